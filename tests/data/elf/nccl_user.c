extern int ncclAllReduce(void); extern int ncclCommWindowRegister(void); extern int unrelated(void);
int go(void) { return ncclAllReduce() + ncclCommWindowRegister() + unrelated(); }
