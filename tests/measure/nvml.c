/* A driver library with one device (and two more, of which only the links are known), so that the ctypes calls are tested where there is no GPU. */
#include <string.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
typedef struct { unsigned long long total, free, used; } memory;
int getpid(void);
static int device = 1, second = 2, third = 3;
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "580.65.06", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) { *out = &device; return strcmp(uuid, "GPU-abc"); }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
    *out = i == 0 ? &device : i == 1 ? &second : &third;
    return i > 2;
}
#define CHECK if (handle != &device) return 2
int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *out) { CHECK; *out = kind == 1 ? 1980 : 3201; return 0; }
int nvmlDeviceGetMaxClockInfo(void *handle, int kind, unsigned *out) { CHECK; *out = 1980; return 0; }
int nvmlDeviceGetTemperature(void *handle, int kind, unsigned *out) { CHECK; *out = 41; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *out) { CHECK; *out = 123456; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out) { CHECK; *out = 700000; return 0; }
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *out) { CHECK; *out = 1ull << 40; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *out) { CHECK; *out = 0x4; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory *out) { CHECK; out->total = 1ull << 37; return 0; }
int nvmlDeviceGetName(void *handle, char *out, unsigned n) { CHECK; strncpy(out, "Made Up 100", n); return 0; }
int nvmlDeviceGetUUID(void *handle, char *out, unsigned n) {
    strncpy(out, handle == &device ? "GPU-abc" : handle == &second ? "GPU-2" : "GPU-3", n);
    return 0;
}
int nvmlDeviceGetP2PStatus(void *handle, void *other, int what, unsigned *out) {
    CHECK;
    *out = other == &second && what == 2 ? 0 : 1;
    return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(void *handle, void *other, unsigned *out) { CHECK; *out = 50; return 0; }
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *out) { CHECK; *out = link < 4; return link > 5; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process *out) {
    CHECK;
    if (*count < 2) return 7;
    *count = 2;
    out[0].pid = 1; out[0].used = 5;
    out[1].pid = getpid(); out[1].used = 3ull << 30;
    return 0;
}
