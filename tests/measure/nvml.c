/* A driver library with one device, so that the ctypes calls are tested where there is no GPU. */
#include <string.h>
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
typedef struct { unsigned long long total, free, used; } memory;
int getpid(void);
static int device = 1;
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { strncpy(out, "580.65.06", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) { *out = &device; return strcmp(uuid, "GPU-abc"); }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) { *out = &device; return i != 0; }
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
int nvmlDeviceGetUUID(void *handle, char *out, unsigned n) { CHECK; strncpy(out, "GPU-abc", n); return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process *out) {
    CHECK;
    if (*count < 2) return 7;
    *count = 2;
    out[0].pid = 1; out[0].used = 5;
    out[1].pid = getpid(); out[1].used = 3ull << 30;
    return 0;
}
