/* term - Erlang terms in and out, and nothing else: the one file of the NIF that takes terms apart and builds them. */
#ifndef KMQ_TERM_H
#define KMQ_TERM_H

#include <erl_nif.h>
#include "atoms.h"
#include "kafka.h"

/* [{binary, binary}] -> properties. One allocation for all of it: *memory, freed with enif_free. false = not of that shape. */
bool term_properties(ErlNifEnv *env, ERL_NIF_TERM list, kafka_property **out, size_t *n, void **memory);
/* A binary as a NUL-terminated copy (enif_free); NULL when it is not a binary or has a NUL inside. */
char *term_string(ErlNifEnv *env, ERL_NIF_TERM term);
/* A token with what holds it: token, end of life (ms since 1970), principal, extensions. False: something else. */
typedef struct term_token_memory {
    kafka_token token;
    char *text, *principal;
    void *extensions;
} term_token_memory;
bool term_token(ErlNifEnv *env, const ERL_NIF_TERM argv[4], term_token_memory *out);
void term_token_free(term_token_memory *memory);
bool term_map_int64(ErlNifEnv *env, ERL_NIF_TERM map, ERL_NIF_TERM key, int64_t *out);
ERL_NIF_TERM term_binary(ErlNifEnv *env, const void *bytes, size_t size);
ERL_NIF_TERM term_text(ErlNifEnv *env, const char *text);
/* {Name, Code, Retriable, Fatal, Text}, and {error, that} */
ERL_NIF_TERM term_kafka_error(ErlNifEnv *env, const kafka_error *err);
ERL_NIF_TERM term_error(ErlNifEnv *env, const kafka_error *err);
ERL_NIF_TERM term_error_atom(ErlNifEnv *env, ERL_NIF_TERM atom);
ERL_NIF_TERM term_ok(ErlNifEnv *env, ERL_NIF_TERM value);

#endif
