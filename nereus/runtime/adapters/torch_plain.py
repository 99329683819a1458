"""Plain torch: a module whose parameters this rank holds as they are (alone, or replicated by DDP), and an optimizer.

    adapter = PlainTorch(module, optimizer, naming=HfNaming(arch=arch), scheduler=scheduler)
    adapter.prepare(job_state)      # on new objects: the optimizer has no state before its first step
    binding = adapter.bind()        # ... written by a move ...
    adapter.finish(job_state)

A module built on the meta device adopts memory instead: ``binding = adapter.allocate(job_state)``, then, once it is
written, ``adapter.adopt(binding)`` and ``finish``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch

from nereus.ir.fragment import Segment, fragments_of
from nereus.models.naming.base import UnknownParameter, Where
from nereus.models.naming.explicit import ExplicitNaming
from nereus.models.naming.hf import unwrapped
from nereus.runtime.adapters import torch_checklist, torch_state
from nereus.runtime.adapters.base import DTYPE_NAMES, BindError, Binding, BindingBuilder, PostCondition
from nereus.runtime.adapters.classify import (
    DERIVED,
    Census,
    Declared,
    Known,
    local_tensor,
    take_module,
    take_object,
)


class _Names(Protocol):
    """The part of ``Naming`` that an adapter asks."""

    def segments(self, parameter: str, shape: Sequence[int], where: Where) -> tuple[Segment, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """What this rank holds of one tensor: live memory (contiguous), and segments at their places in it, seen as a
    matrix of ``num_cols`` columns."""

    data: torch.Tensor
    segments: tuple[Segment, ...]
    num_cols: int
    host: bool = False


@dataclass(slots=True)
class _Inventory:
    """One walk over module and optimizer."""

    census: Census
    #: (name, tensor, whole segments) of parameters and persistent buffers; a tied one once.
    weights: list[tuple[str, torch.Tensor, tuple[Segment, ...]]]
    extra: list[tuple[str, str, torch.Tensor, tuple[Segment, ...]]]  # name, slot, tensor: declared state
    optimizer: torch_state.OptimizerView

    def segments(self) -> dict[str, tuple[Segment, ...]]:
        return {name: segments for name, _, segments in self.weights}

    def logical(self) -> dict[str, tuple[str, ...]]:
        """Parameter -> its logical tensors."""
        return {name: tuple(dict.fromkeys(s.tensor for s in found)) for name, found in self.segments().items()}


class PlainTorch:
    """``Adapter`` of a torch module and optimizer. Both builder modes.

    ``naming``: a Naming, or parameter name -> segments. ``declared``: what hangs on the module beside what torch and
    the naming know. ``rebuild``: makes derived tensors again, after each move; transformers' rotary tables need none.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        naming: _Names | Mapping[str, Sequence[Segment]],
        where: Where | None = None,
        rank: int | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        declared: Declared | None = None,
        slot_names: Mapping[str, str] = torch_state.SLOT_NAMES,
        rebuild: Callable[[], None] | None = None,
    ) -> None:
        self.module, self.optimizer, self.scheduler, self.scaler = module, optimizer, scheduler, scaler
        self._naming: _Names = ExplicitNaming(naming) if isinstance(naming, Mapping) else naming
        self._where = Where() if where is None else where
        joined = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._rank = rank if rank is not None else torch.distributed.get_rank() if joined else 0
        self._declared = Declared() if declared is None else declared
        self._slot_names = slot_names
        self._rebuild = rebuild
        self._version = 0
        self._finished: dict[str, Any] | None = None
        #: As they are when the job is built: what is registered later is additional, what goes missing is a fault.
        self.hooks = torch_checklist.hooks(module)

    # What a kind of parameter (DTensor, ...) changes.

    def _settle(self) -> None:
        """Before a walk: bring the module into the state in which its parameters are the ones that train."""

    def _local(self, name: str, tensor: torch.Tensor, segments: tuple[Segment, ...]) -> Local:
        """Raises BindError for a tensor that is not plain."""
        if type(tensor.data) is not torch.Tensor:
            raise BindError(f"{name} is a {type(tensor.data).__name__}; this adapter binds plain tensors")
        return Local(data=tensor.detach(), segments=segments, num_cols=num_cols(tensor.shape))

    def _invalidate(self) -> None:
        """After a write: what was computed from the old values is dropped."""

    def _conditions(self) -> tuple[PostCondition, ...]:
        return ()

    # Binding.

    def bind(self) -> Binding:
        """Live storages and fragments. BindError names everything reachable that is not understood."""
        self._settle()
        inventory = self._walk()
        inventory.census.raise_if_unknown()
        builder = BindingBuilder(self._rank)
        builder.derived.extend(inventory.census.derived)
        builder.caches.extend(inventory.census.caches)
        segments = inventory.segments()
        for name, tensor, whole in inventory.weights:
            self._add(builder, name, "weight", self._local(name, tensor, whole))
        for name, slot, tensor in inventory.optimizer.slots:
            self._add(builder, f"{name}:{slot}", slot, self._local(name, tensor, segments[name]))
        for name, slot, tensor, whole in inventory.extra:
            self._add(builder, f"{name}:{slot}", slot, self._local(name, tensor, whole))
        return builder.finish()

    def _add(self, builder: BindingBuilder, name: str, slot: str, local: Local) -> None:
        if local.data.is_meta:
            raise BindError(f"{name} is on the meta device: it has no memory yet; use allocate and adopt")
        if local.data.numel() == 0:  # a rank that holds no row of it
            return
        storage = builder.storage(name, local.data, host=local.host)
        builder.fragments.extend(fragments_of(local.segments, num_cols=local.num_cols, slot=slot, storage=storage))

    def _named(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """(name, tensor, persistent) of every parameter and buffer, under each of its names."""
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            yield name, parameter, True
        for prefix, owner in self.module.named_modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    path = f"{prefix}.{name}" if prefix else name
                    yield path, buffer, name not in owner._non_persistent_buffers_set

    def _walk(self) -> _Inventory:
        census, known = Census(self._declared), Known()
        inventory = _Inventory(census, [], [], torch_state.OptimizerView())
        names: dict[int, str] = {}
        tensors = list(self._named())
        if lazy := [name for name, tensor, _ in tensors if torch.nn.parameter.is_lazy(tensor)]:
            raise BindError(f"{', '.join(lazy)}: a lazy module gets its parameters in its first forward: run it before")
        for _, tensor, _ in tensors:
            known.add(tensor)
        for name, tensor, persistent in tensors:
            path = unwrapped(name)
            if self._declared.kind(path) is not None or _derived(path, tensor):
                census.take(path, tensor, "a buffer")
            elif not persistent:
                census.refuse(path, f"a buffer {list(tensor.shape)} that no checkpoint saves")
            elif id(tensor) in names:
                self._check_tied(inventory, path, names[id(tensor)], tensor)
            else:
                self._take_weight(inventory, names, path, tensor)
        _refuse_second_holders(inventory)
        _refuse_shared_memory(inventory)
        for value in (self.optimizer, self.scheduler, self.scaler):
            known.add(value)
        if self.optimizer is not None:
            inventory.optimizer = torch_state.view(self.optimizer, names, census, known, self._slot_names)
            for key, value in vars(self.optimizer).items():
                if key not in ("state", "param_groups"):
                    take_object(census, value, f"optimizer.{key}", known)
        take_module(census, self.module, "", known)
        for part, value in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if value is not None and not torch_state.is_plain(torch_state.plain_state(value)):
                census.refuse(part, f"the state of a {type(value).__name__} is not made of plain values")
        for path, tensor in census.state:
            self._take_declared(inventory, path, tensor)
        return inventory

    def _take_weight(self, inventory: _Inventory, names: dict[int, str], name: str, tensor: torch.Tensor) -> None:
        if not tensor.numel():  # nothing to move, whatever it is called
            names[id(tensor)] = name
            inventory.weights.append((name, tensor, ()))
            return
        try:
            segments = self._naming.segments(name, tuple(tensor.shape) or (1,), self._where)
        except UnknownParameter as error:
            inventory.census.refuse(name, str(error))
            return
        if tensor.dtype not in DTYPE_NAMES:
            inventory.census.refuse(name, f"state of dtype {tensor.dtype} is not known")
            return
        names[id(tensor)] = name
        inventory.weights.append((name, tensor, segments))

    def _check_tied(self, inventory: _Inventory, name: str, first: str, tensor: torch.Tensor) -> None:
        try:
            segments = self._naming.segments(name, tuple(tensor.shape), self._where)
        except UnknownParameter as error:
            inventory.census.refuse(name, str(error))
            return
        if segments != inventory.segments()[first]:
            inventory.census.refuse(name, f"shares its memory with {first}, and the model has two tensors there")

    def _take_declared(self, inventory: _Inventory, path: str, tensor: torch.Tensor) -> None:
        found = self._declared.slot(path)
        assert found is not None
        parameter, slot = found
        try:
            segments = self._naming.segments(unwrapped(parameter), tuple(tensor.shape) or (1,), self._where)
        except UnknownParameter as error:
            inventory.census.refuse(path, f"declared as slot {slot}: {error}")
            return
        inventory.extra.append((path, slot, tensor, segments))

    # What goes on.

    def job_state(self) -> dict[str, object]:
        self._settle()
        inventory = self._walk()
        inventory.census.raise_if_unknown()
        optimizer: dict[str, object] = {}
        if self.optimizer is not None:
            optimizer = torch_state.to_job_state(self.optimizer, inventory.optimizer, inventory.logical())
        return {
            "optimizer": optimizer,
            "scheduler": None if self.scheduler is None else torch_state.plain_state(self.scheduler),
            "scaler": None if self.scaler is None else torch_state.plain_state(self.scaler),
            "carried": {path: _carried(path, value) for path, value in inventory.census.carried},
            "version": self._version,
        }

    def prepare(self, job_state: Mapping[str, Any]) -> None:
        """Give a new optimizer the slots and scalars of ``job_state``, empty, so that ``bind`` shows them."""
        if self.optimizer is None:
            return
        self._settle()
        self._fill_optimizer(job_state, lambda name, slot, parameter, dtype: _empty_like(parameter, dtype))

    def _fill_optimizer(
        self,
        job_state: Mapping[str, Any],
        tensor_of: Callable[[str, str, torch.Tensor, torch.dtype], torch.Tensor],
    ) -> None:
        assert self.optimizer is not None
        inventory = self._walk()
        inventory.census.raise_if_unknown()
        restored, logical = self._restored(job_state), inventory.logical()
        names = {id(tensor): name for name, tensor, _ in inventory.weights}
        for group, members in torch_state.group_members(self.optimizer, names):
            for name, parameter in members:
                state = self.optimizer.state[parameter]
                for slot, dtype in restored.slots(name, logical[name]).items():
                    state[restored.keys[slot]] = tensor_of(name, slot, parameter, dtype)
                for scalar, value in restored.scalars(name, logical[name]).items():
                    kind = restored.kind(scalar, logical[name])
                    state[scalar] = torch_state.scalar(kind, value, parameter, group)

    def _restored(self, job_state: Any) -> torch_state.Restored:
        if not isinstance(job_state, Mapping) or not job_state.get("optimizer"):
            raise BindError("the job state has no optimizer, and this module is trained with one")
        restored = torch_state.Restored(job_state["optimizer"])
        if self.optimizer is not None:
            restored.check_class(self.optimizer)
        return restored

    def finish(self, job_state: Mapping[str, Any]) -> None:
        """Set the optimizer's groups and scalars, scheduler, scaler, carried values and version; drop gradients and
        what was computed from the old weights."""
        self._settle()
        inventory = self._walk()
        inventory.census.raise_if_unknown()
        job_state = _checked(job_state)
        if self.optimizer is not None:
            restored, logical = self._restored(job_state), inventory.logical()
            names = {id(tensor): name for name, tensor, _ in inventory.weights}
            sources = []
            for group, members in torch_state.group_members(self.optimizer, names):
                source = restored.source_group((name, logical[name]) for name, _ in members)
                sources.append(source)
                torch_state.set_options(group, restored.options(source))
                for name, parameter in members:
                    for scalar, value in restored.scalars(name, logical[name]).items():
                        kind = restored.kind(scalar, logical[name])
                        self.optimizer.state[parameter][scalar] = torch_state.scalar(kind, value, parameter, group)
            if job_state.get("scheduler"):
                scheduler = torch_state.regrouped(job_state["scheduler"], sources, restored.num_groups)
                job_state["scheduler"] = scheduler
        for part, value in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            if (value is None) != (job_state.get(part) is None):
                raise BindError(f"a {part} is on one side of the change only: give the adapter the one of this side")
            if value is not None and job_state[part]:
                value.load_state_dict(dict(job_state[part]))
        for path, live in inventory.census.carried:
            if path not in job_state["carried"]:
                raise BindError(f"{path} is carried here and is not in the job state")
            _set_carried(path, live, job_state["carried"][path])
        self.drop_gradients()
        self._invalidate()
        torch_checklist.rebuild_rotary(self.module)
        if self._rebuild is not None:
            self._rebuild()
        self._version = int(job_state["version"])
        self._finished = job_state

    def drop_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def checklist(self) -> tuple[PostCondition, ...]:
        # The framework's own first: the general ones walk, and a walk settles the module.
        return (*self._conditions(), *torch_checklist.conditions(self))

    def inventory(self) -> _Inventory:
        self._settle()
        return self._walk()

    @property
    def finished(self) -> dict[str, Any] | None:
        """The job state that ``finish`` was given."""
        return self._finished

    def version(self) -> int:
        return self._version

    def set_version(self, version: int) -> None:
        self._version = version

    # Adopting memory.

    def allocate(self, job_state: Mapping[str, Any], device: torch.device | str = "cpu") -> Binding:
        """New memory, not initialised, for every weight (of the module's dtypes) and optimizer slot."""
        inventory = self._walk()
        inventory.census.raise_if_unknown()
        builder, logical = BindingBuilder(self._rank), inventory.logical()
        trained = set(inventory.optimizer.group)
        restored = self._restored(job_state) if trained else None
        for name, tensor, segments in inventory.weights:
            wanted = {"weight": tensor.dtype}
            if restored is not None and name in trained:
                wanted |= restored.slots(name, logical[name])
            for slot, dtype in wanted.items():
                data = torch.empty(tuple(tensor.shape), dtype=dtype, device=device)
                local = Local(data=data, segments=segments, num_cols=num_cols(tensor.shape))
                self._add(builder, name if slot == "weight" else f"{name}:{slot}", slot, local)
        return builder.finish()

    def adopt(self, binding: Binding, job_state: Mapping[str, Any]) -> None:
        """The module and the optimizer take over the memory of ``allocate``; nothing is copied."""
        shapes = {name: tensor.shape for name, tensor, _ in self._walk().weights}
        given = {}
        for storage, memory in zip(binding.state.storages, binding.memory, strict=True):
            name, _, slot = storage.name.partition(":")
            if name not in shapes or memory.numel() != shapes[name].numel():
                raise BindError(f"{storage.name}: {memory.numel()} elements belong to no parameter of this module")
            given[name, slot or "weight"] = memory.view(shapes[name])
        self.adopt_tensors(given, job_state)

    def adopt_tensors(self, given: Mapping[tuple[str, str], torch.Tensor], job_state: Mapping[str, Any]) -> None:
        """``given``: (parameter name, slot) -> tensor. BindError names what is missing, left over, or has another
        shape, strides or dtype than the module expects."""
        inventory = self._walk()
        inventory.census.raise_if_unknown()
        logical, trained = inventory.logical(), set(inventory.optimizer.group)
        restored = self._restored(job_state) if trained else None
        expected = {(name, "weight"): (tensor.shape, tensor.dtype) for name, tensor, _ in inventory.weights}
        for name, tensor, _ in inventory.weights:
            if restored is not None and name in trained:
                for slot, dtype in restored.slots(name, logical[name]).items():
                    expected[name, slot] = (tensor.shape, dtype)
        faults = [f"{name} {slot}: not given" for name, slot in expected if (name, slot) not in given]
        faults += [f"{name} {slot}: not of this module" for name, slot in given if (name, slot) not in expected]
        for key, tensor in given.items():
            if key not in expected:
                continue
            shape, dtype = expected[key]
            if tensor.shape != shape or tensor.dtype != dtype:
                faults.append(f"{' '.join(key)}: {list(tensor.shape)} {tensor.dtype}, not {list(shape)} {dtype}")
            elif not tensor.is_contiguous():
                faults.append(f"{' '.join(key)}: strides {tensor.stride()} are not those of contiguous {list(shape)}")
        if faults:
            raise BindError("the tensors do not fit the module:\n  " + "\n  ".join(faults))
        for name, tensor, _ in inventory.weights:
            _take_over(name, tensor, given[name, "weight"])
        if self.optimizer is not None and restored is not None:
            self.optimizer.state.clear()
            self._fill_optimizer(job_state, lambda name, slot, parameter, dtype: given[name, slot])


def num_cols(shape: Sequence[int]) -> int:
    """Columns of a tensor seen as a matrix: all dims but the last by the last; a vector is n x 1."""
    return shape[-1] if len(shape) > 1 else 1


def _derived(path: str, tensor: torch.Tensor) -> bool:
    """Whether a module computes it from its configuration. A parameter is learned, whatever its name."""
    return not isinstance(tensor, torch.nn.Parameter) and any(fnmatchcase(path, pattern) for pattern in DERIVED)


def _refuse_second_holders(inventory: _Inventory) -> None:
    """Two parameters with one logical element would be trained apart from each other."""
    holders: dict[str, list[tuple[str, Segment]]] = {}
    for name, _, segments in inventory.weights:
        for mine in segments:
            for other, theirs in holders.get(mine.tensor, ()):
                rows = min(mine.row_hi, theirs.row_hi) > max(mine.row_lo, theirs.row_lo)
                if rows and min(mine.col_hi, theirs.col_hi) > max(mine.col_lo, theirs.col_lo):
                    why = f"holds {mine.tensor}, as {other} does, in memory of its own: tie them"
                    if name == other:
                        why = f"two parts of the naming overlap in {mine.tensor}: a part of it lies there twice"
                    inventory.census.refuse(name, why)
            holders.setdefault(mine.tensor, []).append((name, mine))


def _refuse_shared_memory(inventory: _Inventory) -> None:
    """Parameters that overlap without being one object train together; in the new objects they would not."""
    spans = []
    for name, tensor, _ in inventory.weights:
        local = local_tensor(tensor)
        if type(local) is torch.Tensor and not local.is_meta and local.is_contiguous() and local.numel():
            begin = local.data_ptr()
            spans.append((begin, begin + local.numel() * local.element_size(), name))
    reached, owner = 0, ""
    for begin, end, name in sorted(spans):
        if begin < reached:
            why = f"shares memory with {owner} and is another parameter: make them one object, or copy one of them"
            inventory.census.refuse(name, why)
        if end > reached:
            reached, owner = end, name


def _checked(job_state: Any) -> dict[str, Any]:
    """BindError before anything is set where ``job_state`` is not what ``job_state()`` gives."""
    if not isinstance(job_state, Mapping):
        raise BindError(f"a job state is what job_state() gives, not a {type(job_state).__name__}")
    if type(version := job_state.get("version")) is not int:
        raise BindError(f"the job state's version is {version!r}: it is not of a torch adapter's job_state()")
    return {"optimizer": {}, "scheduler": None, "scaler": None, "carried": {}, **job_state}


def _empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format, requires_grad=False)


def _take_over(name: str, parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """``parameter`` keeps its identity (groups, hooks, ties) and gets the memory of ``tensor``."""
    if not parameter.is_meta:
        parameter.data = tensor
        return
    new: torch.Tensor = tensor
    if isinstance(parameter, torch.nn.Parameter):
        new = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    else:
        new = tensor.detach()
    try:
        torch.utils.swap_tensors(parameter, new)
    except RuntimeError as error:
        raise BindError(f"{name} on the meta device cannot be given memory: {error}") from None


def _carried(path: str, value: object) -> object:
    if isinstance(value, torch.nn.Module) and path.endswith("_extra_state"):
        value = value.get_extra_state()
    if isinstance(value, torch.Tensor):
        return {"dtype": DTYPE_NAMES.get(value.dtype, str(value.dtype)), "values": local_tensor(value).tolist()}
    if not torch_state.is_plain(value):
        raise BindError(f"{path} is declared carried, and its value ({type(value).__name__}) is not plain")
    return value


def _set_carried(path: str, live: object, value: Any) -> None:
    if isinstance(live, torch.nn.Module):
        live.set_extra_state(value)
    elif isinstance(live, torch.Tensor):
        local_tensor(live).copy_(torch.tensor(value["values"], dtype=live.dtype))
    else:
        raise BindError(f"{path}: a {type(live).__name__} cannot be set again; carry a tensor or extra state")
