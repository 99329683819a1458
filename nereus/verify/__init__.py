"""An independent judge of compiled transitions: ``nereus.verify.api``."""
