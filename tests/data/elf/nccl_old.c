int ncclAllReduce(void) { return 0; }
