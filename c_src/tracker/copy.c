/* copy - see copy.h. */
#include "copy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "marker.h"

static const char DELIVERIES[] = "kmq-deliveries", CAUSE[] = "kmq-cause", GROUP[] = "kmq-group",
                  ORIGIN[] = "kmq-origin", ERROR_TEXT[] = "kmq-error", POINTER[] = "kmq-pointer",
                  VALUE_BYTES[] = "kmq-value-bytes";

enum { FEW_HEADERS = 32 };

static char *put(char **at, const void *bytes, size_t n)
{
    char *start = *at;
    if (n) memcpy(start, bytes, n);
    *at = start + n;
    return start;
}

tracker_payload *tracker_payload_new(const kafka_record *record)
{
    kmq_header few[FEW_HEADERS], *headers = few, *many = NULL;
    size_t n = kafka_record_headers(record, few, FEW_HEADERS);
    if (n > FEW_HEADERS) {
        headers = many = malloc(n * sizeof *many);
        if (!many) return NULL;
        n = kafka_record_headers(record, many, n);
    }
    size_t bytes = sizeof(tracker_payload) + n * sizeof(kafka_header) + record->key_len + record->value_len;
    for (size_t i = 0; i < n; i++) bytes += headers[i].name_len + 1 + headers[i].value_len;
    tracker_payload *payload = malloc(bytes);
    if (payload) {
        payload->headers = (kafka_header *)(void *)(payload + 1);
        payload->n_headers = n;
        payload->timestamp_ms = record->timestamp_ms;
        payload->bytes = bytes;
        char *at = (char *)(payload->headers + n);
        payload->key_len = record->key_len;
        payload->key = record->key ? put(&at, record->key, record->key_len) : NULL;
        payload->value_len = record->value_len;
        payload->value = record->value ? put(&at, record->value, record->value_len) : NULL;
        for (size_t i = 0; i < n; i++) {
            kafka_header *h = &payload->headers[i];
            h->name = put(&at, headers[i].name, headers[i].name_len);
            *at++ = 0;
            h->value_len = headers[i].value_len;
            h->value = headers[i].value ? put(&at, headers[i].value, headers[i].value_len) : NULL;
        }
    }
    free(many);
    return payload;
}

size_t tracker_payload_written(const tracker_payload *payload, tracker_extent extent)
{
    if (extent == TRACKER_BARE_POINTER) return 0;
    size_t bytes = payload->key_len + (extent == TRACKER_WHOLE ? payload->value_len : 0);
    for (size_t i = 0; i < payload->n_headers; i++)
        bytes += strlen(payload->headers[i].name) + payload->headers[i].value_len;
    return bytes;
}

static const kafka_header *find(const kafka_header *headers, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(headers[i].name, name) == 0) return &headers[i];
    return NULL;
}

static int64_t decimal(const kafka_header *header)
{
    if (!header || !header->value) return 0;
    const uint8_t *digits = header->value;
    int64_t number = 0;
    for (size_t i = 0; i < header->value_len; i++) {
        if (digits[i] < '0' || digits[i] > '9') return 0;
        if (number < INT64_MAX / 100) number = number * 10 + (digits[i] - '0');
    }
    return number;
}

tracker_fate tracker_decide(const kafka_header *headers, size_t n_headers, const char *count_header,
                            int64_t max_redeliveries, uint8_t cause, uint8_t flags)
{
    const kafka_header *counter = find(headers, n_headers, count_header);
    int32_t count = counter && counter->value ? kmq_count_decode(counter->value, counter->value_len) : 0;
    bool parked = flags & KMQ_FLAG_PARKED;
    bool counts = !parked && (cause == KMQ_RETRY_CRASH || (flags & KMQ_FLAG_COUNTS));
    if (counts && count < INT32_MAX) count++;
    return (tracker_fate){
        .dead = (flags & KMQ_FLAG_DLQ) || (counts && count > max_redeliveries),
        .count = count,
        .deliveries = decimal(find(headers, n_headers, DELIVERIES)) + (parked ? 0 : 1),
    };
}

static bool ours(const char *name, const char *count_header)
{
    if (strcmp(name, count_header) == 0) return true;
    if (strncmp(name, "kmq-", 4) != 0) return false;
    return strcmp(name, DELIVERIES) == 0 || strcmp(name, CAUSE) == 0 || strcmp(name, GROUP) == 0 ||
           strcmp(name, ORIGIN) == 0 || strcmp(name, ERROR_TEXT) == 0 || strcmp(name, POINTER) == 0 ||
           strcmp(name, VALUE_BYTES) == 0;
}

static kafka_header text_header(const char *name, const char *text) { return (kafka_header){name, text, strlen(text)}; }

static void print_place(const tracker_source *source, char out[TRACKER_ORIGIN_BYTES])
{
    snprintf(out, TRACKER_ORIGIN_BYTES, "%s/%" PRId32 "/%" PRId64 "/%" PRId64, source->topic, source->partition,
             source->offset, source->timestamp_ms);
}

size_t tracker_rewrite(const tracker_source *source, const tracker_fate *fate, const kafka_header *in, size_t n,
                       kafka_header *out, tracker_stamp *stamp)
{
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        if (source->extent != TRACKER_BARE_POINTER && !ours(in[i].name, source->count_header)) out[k++] = in[i];
    out[k++] = (kafka_header){source->count_header, stamp->count, kmq_count_encode(stamp->count, fate->count)};
    snprintf(stamp->deliveries, sizeof stamp->deliveries, "%" PRId64, fate->deliveries);
    out[k++] = text_header(DELIVERIES, stamp->deliveries);
    out[k++] = text_header(CAUSE, tracker_cause_name(source->cause));
    out[k++] = text_header(GROUP, source->group);
    const kafka_header *origin = find(in, n, ORIGIN);
    if (origin) {
        out[k++] = *origin;
    } else {
        print_place(source, stamp->origin);
        out[k++] = text_header(ORIGIN, stamp->origin);
    }
    if (fate->dead && source->text && source->text_len && source->extent != TRACKER_BARE_POINTER)
        out[k++] = (kafka_header){ERROR_TEXT, source->text, source->text_len};
    if (source->extent != TRACKER_WHOLE) {
        print_place(source, stamp->place);
        snprintf(stamp->value_bytes, sizeof stamp->value_bytes, "%zu", source->value_len);
        out[k++] = text_header(POINTER, stamp->place);
        out[k++] = text_header(VALUE_BYTES, stamp->value_bytes);
    }
    return k;
}

const char *tracker_cause_name(uint8_t cause)
{
    const char *name = kmq_retry_cause_name(cause);
    return name ? name : "failed";
}
