#include "term.h"

#include <string.h>

struct kmq_atoms atoms;

void atoms_load(ErlNifEnv *env)
{
#define X(name) atoms.name = enif_make_atom(env, #name);
#define X2(name, text) atoms.name = enif_make_atom(env, text);
    KMQ_ATOMS(X, X2)
#undef X
#undef X2
}

char *term_string(ErlNifEnv *env, ERL_NIF_TERM term)
{
    ErlNifBinary bin;
    if (!enif_inspect_binary(env, term, &bin) || (bin.size && memchr(bin.data, 0, bin.size))) return NULL;
    char *copy = enif_alloc(bin.size + 1);
    if (!copy) return NULL;
    if (bin.size) memcpy(copy, bin.data, bin.size);
    copy[bin.size] = 0;
    return copy;
}

/* Names and values are packed behind the array, so that one free returns all. */
bool term_properties(ErlNifEnv *env, ERL_NIF_TERM list, kafka_property **out, size_t *n, void **memory)
{
    unsigned length;
    if (!enif_get_list_length(env, list, &length)) return false;
    size_t bytes = length * sizeof(kafka_property);
    ERL_NIF_TERM head, tail = list;
    while (enif_get_list_cell(env, tail, &head, &tail)) {
        const ERL_NIF_TERM *pair;
        int arity;
        ErlNifBinary name, value;
        if (!enif_get_tuple(env, head, &arity, &pair) || arity != 2 || !enif_inspect_binary(env, pair[0], &name) ||
            !enif_inspect_binary(env, pair[1], &value) || memchr(name.data, 0, name.size) ||
            memchr(value.data, 0, value.size))
            return false;
        bytes += name.size + value.size + 2;
    }
    kafka_property *props = enif_alloc(bytes + 1);
    if (!props) return false;
    char *at = (char *)(props + length);
    size_t i = 0;
    tail = list;
    while (enif_get_list_cell(env, tail, &head, &tail)) {
        const ERL_NIF_TERM *pair;
        int arity;
        ErlNifBinary part[2];
        enif_get_tuple(env, head, &arity, &pair);
        const char *start[2];
        for (int k = 0; k < 2; k++) {
            enif_inspect_binary(env, pair[k], &part[k]);
            start[k] = at;
            memcpy(at, part[k].data, part[k].size);
            at[part[k].size] = 0;
            at += part[k].size + 1;
        }
        props[i++] = (kafka_property){.name = start[0], .value = start[1]};
    }
    *out = props;
    *memory = props;
    *n = length;
    return true;
}

bool term_token(ErlNifEnv *env, const ERL_NIF_TERM argv[4], term_token_memory *out)
{
    kafka_property *extensions;
    ErlNifSInt64 expires_ms;
    *out = (term_token_memory){0};
    char *token = term_string(env, argv[0]), *principal = term_string(env, argv[2]);
    if (!token || !principal || !enif_get_int64(env, argv[1], &expires_ms) ||
        !term_properties(env, argv[3], &extensions, &out->token.n_extensions, &out->extensions)) {
        enif_free(token);
        enif_free(principal);
        return false;
    }
    out->token.token = out->text = token;
    out->token.principal = out->principal = principal;
    out->token.expires_ms = expires_ms;
    out->token.extensions = extensions;
    return true;
}

void term_token_free(term_token_memory *memory)
{
    enif_free(memory->text);
    enif_free(memory->principal);
    enif_free(memory->extensions);
}

bool term_map_int64(ErlNifEnv *env, ERL_NIF_TERM map, ERL_NIF_TERM key, int64_t *out)
{
    ERL_NIF_TERM value;
    ErlNifSInt64 number;
    if (!enif_get_map_value(env, map, key, &value) || !enif_get_int64(env, value, &number)) return false;
    *out = number;
    return true;
}

ERL_NIF_TERM term_binary(ErlNifEnv *env, const void *bytes, size_t size)
{
    ERL_NIF_TERM term;
    unsigned char *data = enif_make_new_binary(env, size, &term);
    if (size) memcpy(data, bytes, size);
    return term;
}

ERL_NIF_TERM term_text(ErlNifEnv *env, const char *text) { return term_binary(env, text, text ? strlen(text) : 0); }

ERL_NIF_TERM term_kafka_error(ErlNifEnv *env, const kafka_error *err)
{
    return enif_make_tuple5(env, term_text(env, err->name), enif_make_int(env, err->code),
                            err->retriable ? atoms.true_ : atoms.false_, err->fatal ? atoms.true_ : atoms.false_,
                            term_text(env, err->text));
}

ERL_NIF_TERM term_error(ErlNifEnv *env, const kafka_error *err)
{
    return enif_make_tuple2(env, atoms.error, term_kafka_error(env, err));
}

ERL_NIF_TERM term_error_atom(ErlNifEnv *env, ERL_NIF_TERM atom) { return enif_make_tuple2(env, atoms.error, atom); }
ERL_NIF_TERM term_ok(ErlNifEnv *env, ERL_NIF_TERM value) { return enif_make_tuple2(env, atoms.ok, value); }
