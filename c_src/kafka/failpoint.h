/* failpoint - exact crash windows for tests. KMQ_FAILPOINTS="start_report=kill@3,copy_end=kill": the third time the named point is
 * reached the process kills itself with SIGKILL. Actions: kill, stop (SIGSTOP), fail (returns true). @N = the N-th hit, default the first; `fail` from the N-th on, `fail@N*M` M times.
 * Compiled in with -DKMQ_FAILPOINTS only (test builds); otherwise the macro is `false`. */
#ifndef KMQ_FAILPOINT_H
#define KMQ_FAILPOINT_H
#include <stdbool.h>
#ifdef KMQ_FAILPOINTS
bool kmq_failpoint_hit(const char *name);
#define KMQ_FAILPOINT(name) kmq_failpoint_hit(name)
#else
#define KMQ_FAILPOINT(name) false
#endif
#endif
