extern int __nvJitLinkGetErrorLog_13_1(void);
extern int __attribute__((weak)) __nvJitLinkGetErrorLog_14_0(void);
int run(void) { return __nvJitLinkGetErrorLog_13_1() + (__nvJitLinkGetErrorLog_14_0 ? 1 : 0); }
