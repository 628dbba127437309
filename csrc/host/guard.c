#define _DEFAULT_SOURCE /* sigaction and MAP_ANONYMOUS, beside c99 */
#include "guard.h"

#if defined(__unix__) || defined(__APPLE__)

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

static fs_guard *guards;
static struct sigaction before;

/* Only what a signal handler may do: it looks through the guards and maps zeros, with one system call. */
static void on_bus_error(int number, siginfo_t *info, void *context)
{
    uintptr_t at = (uintptr_t)info->si_addr, page = (uintptr_t)sysconf(_SC_PAGESIZE);
    (void)number, (void)context;
    for (fs_guard *guard = guards; guard; guard = guard->next) {
        uintptr_t start = (uintptr_t)guard->start, end = start + guard->size, from = at - at % page;
        if (at < start || at >= end)
            continue;
        if (mmap((void *)from, end - from, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
            break;
        guard->lost = 1;
        return;
    }
    /* Not ours: the read happens again, and ends as it would have without us. */
    sigaction(SIGBUS, &before, NULL);
}

void fs_guard_range(fs_guard *guard)
{
    if (!guards) {
        struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO};
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, &before);
    }
    guard->next = guards;
    guards = guard;
}

void fs_unguard(fs_guard *guard)
{
    fs_guard **link = &guards;
    while (*link && *link != guard)
        link = &(*link)->next;
    if (!*link)
        return;
    *link = guard->next;
    if (!guards)
        sigaction(SIGBUS, &before, NULL);
}

#else /* where a mapped file cannot be cut short */

void fs_guard_range(fs_guard *guard) { guard->next = NULL; }
void fs_unguard(fs_guard *guard) { guard->next = NULL; }

#endif
