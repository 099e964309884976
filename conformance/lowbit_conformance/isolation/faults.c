/* Where a fault happened: the handler writes it to a page that outlives the process, and lets the process die of it. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <ucontext.h>

enum { SIGNAL, ADDRESS, ACCESS };
enum { UNKNOWN, READ, WRITE };

static volatile uint64_t *page;

static uint64_t access_of(int number, void *context)
{
#if defined(__x86_64__) && defined(__linux__)
    if (number == SIGSEGV)
        return ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2 ? WRITE : READ;
#endif
    (void)number, (void)context;
    return UNKNOWN;
}

static void record(int number, siginfo_t *info, void *context)
{
    page[ADDRESS] = (uint64_t)(uintptr_t)info->si_addr;
    page[ACCESS] = access_of(number, context);
    page[SIGNAL] = (uint64_t)number;
    signal(number, SIG_DFL);
    if (info->si_code <= 0) /* sent by a process, so that going back would not repeat it */
        raise(number);
}

/* Answers 0, or -1 if a handler could not be installed. */
int lowbit_record_faults(void *control)
{
    static const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    stack_t stack = {.ss_sp = malloc(65536), .ss_size = 65536}; /* a stack that has overflowed cannot be used */
    struct sigaction action = {.sa_sigaction = record, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    page = control;
    if (stack.ss_sp == NULL || sigaltstack(&stack, NULL) != 0)
        return -1;
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (sigaction(numbers[i], &action, NULL) != 0)
            return -1;
    return 0;
}
