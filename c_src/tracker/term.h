/* term - Erlang's external terms at the edge: whatever a frame holds is checked before ei looks at it.
 *
 * ei trusts lengths and recurses on nesting. tracker_term_check walks a frame without recursion and without allocation, and lets
 * pass only what the protocol knows: integers of up to 64 bits, floats, atoms, binaries, strings, lists, tuples, maps, nested at
 * most TRACKER_TERM_DEPTH deep, every length inside the frame, nothing behind the term. After that ei's functions are safe on it.
 * Costs: O(bytes).  Thread rule: pure. */
#ifndef TRACKER_TERM_H
#define TRACKER_TERM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TRACKER_TERM_DEPTH = 16 };

/* True when `bytes` is exactly one term with its version byte, as above. */
bool tracker_term_check(const uint8_t *bytes, size_t n);

#endif
