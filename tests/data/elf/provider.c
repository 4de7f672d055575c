/* libnvJitLink.so.13 as of 13.0: symbols carry their release. */
int __nvJitLinkGetErrorLog_12_0(void) { return 0; }
int __nvJitLinkGetErrorLog_13_0(void) { return 0; }
int ncclAllReduce(void) { return 0; }
