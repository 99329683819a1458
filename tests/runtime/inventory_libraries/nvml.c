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

int nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected,
                              unsigned int *pending, unsigned int *failure) {
    if (device->index == 2) return NOT_SUPPORTED;
    *corrected = *failure = 0;
    *uncorrected = *pending = device->index;
    return SUCCESS;
}

// Events: GPU 1 says XID 31 (an application's), 79 twice and 48, once they are listened to; GPU 2 supports none.
typedef struct { nvmlDevice_t device; unsigned long long eventType, eventData; unsigned int gi, ci; } nvmlEventData_t;
typedef struct nvmlEventSet_st { unsigned int registered, next; } *nvmlEventSet_t;
static struct nvmlEventSet_st event_set;
enum { XID = 8, TIMEOUT = 10 };

int nvmlEventSetCreate(nvmlEventSet_t *set) {
    event_set.registered = event_set.next = 0;
    *set = &event_set;
    return SUCCESS;
}

int nvmlEventSetFree(nvmlEventSet_t set) { return set == &event_set ? SUCCESS : INVALID_ARGUMENT; }

int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    *types = device->index == 2 ? 0 : 0x1ULL | XID;
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    if (types != XID || set != &event_set) return INVALID_ARGUMENT;
    if (device->index == 2) return NOT_SUPPORTED;
    set->registered |= 1u << device->index;
    return SUCCESS;
}

int nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    const unsigned long long xids[] = {31, 79, 79, 48};
    if (timeout_ms || !(set->registered & 2) || set->next == 4) return TIMEOUT;
    memset(data, 0, sizeof *data);
    data->device = &devices[1];
    data->eventType = XID;
    data->eventData = xids[set->next++];
    return SUCCESS;
}

int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    *index = device->index;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int error, int counter, unsigned long long *count) {
    if (error != 1 || counter != 0) return INVALID_ARGUMENT;
    if (device->index == 2) return NOT_SUPPORTED;
    *count = device->index ? 2 : 0;
    return SUCCESS;
}
