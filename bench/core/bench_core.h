/* The core's data structures in figures: what each file of this folder prints. Called by main in bench_core.c. */
#ifndef BENCH_CORE_H
#define BENCH_CORE_H

void bench_offset_set(void);
void bench_ledger(void);
void bench_lease_book(void);

#endif
