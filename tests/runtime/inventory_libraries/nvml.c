// The part of NVML's C interface that is asked, with figures such as a node gives: GPU 0 in order, GPU 1 hot and with
// memory errors, GPU 2 a virtual one that supports no clocks, temperature or ECC. Signatures as in nvml.h.
#include <string.h>

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct nvmlDevice_st { int index; } *nvmlDevice_t;
static struct nvmlDevice_st devices[3] = {{0}, {1}, {2}};
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

int nvmlInitWithFlags(unsigned int flags) { return flags ? INVALID_ARGUMENT : SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned int *count) {
    *count = 3;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    if (index > 2) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    const char *names[] = {"NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"};
    strncpy(name, names[device->index], length);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    memory->total = 85520809984ULL;
    memory->used = device->index ? 71203946496ULL : 484966400ULL;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(nvmlDevice_t device, int type, unsigned int *clock) {
    if (type != 1) return INVALID_ARGUMENT;
    if (device->index == 2) return NOT_SUPPORTED;
    *clock = device->index ? 1095 : 1980;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, int type, unsigned int *clock) {
    if (type != 1) return INVALID_ARGUMENT;
    if (device->index == 2) return NOT_SUPPORTED;
    *clock = 1980;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *celsius) {
    if (sensor != 0) return INVALID_ARGUMENT;
    if (device->index == 2) return NOT_SUPPORTED;
    *celsius = device->index ? 88 : 34;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    if (device->index == 2) return NOT_SUPPORTED;
    *reasons = device->index ? 0x8ULL | 0x40ULL | 0x4ULL : 0x1ULL; // hot, and at its power limit; idle
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int error, int counter, unsigned long long *count) {
    if (error != 1 || counter != 0) return INVALID_ARGUMENT;
    if (device->index == 2) return NOT_SUPPORTED;
    *count = device->index ? 2 : 0;
    return SUCCESS;
}
