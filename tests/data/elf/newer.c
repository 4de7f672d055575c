int __nvJitLinkGetErrorLog_13_0(void) { return 0; }
int __nvJitLinkGetErrorLog_13_1(void) { return 0; }
