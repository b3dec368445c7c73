/* moving - loaded before libc (LD_PRELOAD), it lets one name move: "moving.test" is the address that stands in the file KMQ_TEST_ADDRESS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int resolver(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **out);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **out)
{
    static resolver *next;
    char address[64] = "";
    const char *path = getenv("KMQ_TEST_ADDRESS");
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "getaddrinfo");
    if (node && path && strcmp(node, "moving.test") == 0) {
        FILE *file = fopen(path, "r");
        if (!file || !fgets(address, sizeof address, file)) return EAI_AGAIN;
        fclose(file);
        address[strcspn(address, "\n")] = 0;
        node = address;
    }
    return next(node, service, hints, out);
}
