// The part of ROCm SMI's C interface that is asked, with figures such as a node gives: GPU 0 without an edge sensor,
// GPU 1 with memory errors. Signatures as in rocm_smi.h.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct { uint64_t correctable_err, uncorrectable_err, deferred_err; } rsmi_error_count_t;
enum { SUCCESS = 0, INVALID_ARGS = 1, NOT_SUPPORTED = 2 };

int rsmi_init(uint64_t flags) { return flags ? INVALID_ARGS : SUCCESS; }
int rsmi_shut_down(void) { return SUCCESS; }

int rsmi_num_monitor_devices(uint32_t *count) {
    *count = 2;
    return SUCCESS;
}

int rsmi_dev_name_get(uint32_t device, char *name, size_t length) {
    strncpy(name, "AMD Instinct MI300X", length);
    return device > 1 ? INVALID_ARGS : SUCCESS;
}

int rsmi_dev_memory_total_get(uint32_t device, int type, uint64_t *total) {
    *total = 206141652992ULL;
    return device > 1 || type != 0 ? INVALID_ARGS : SUCCESS;
}

int rsmi_dev_memory_usage_get(uint32_t device, int type, uint64_t *used) {
    *used = 297123840ULL;
    return device > 1 || type != 0 ? INVALID_ARGS : SUCCESS;
}

int rsmi_dev_temp_metric_get(uint32_t device, uint32_t sensor, int metric, int64_t *celsius) {
    if (metric != 0) return INVALID_ARGS;
    if (device == 0 && sensor == 0) return NOT_SUPPORTED;
    *celsius = sensor == 1 ? 47000 : 41000;
    return SUCCESS;
}

int rsmi_dev_ecc_count_get(uint32_t device, uint64_t block, rsmi_error_count_t *errors) {
    if (block != 1) return INVALID_ARGS;
    errors->correctable_err = 5;
    errors->uncorrectable_err = device ? 3 : 0;
    errors->deferred_err = 0;
    return SUCCESS;
}
