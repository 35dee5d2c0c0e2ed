/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Grant windows: state of a domain (in its struct grant_table) and hooks for
 * the rest of the hypervisor.
 */
#ifndef __XEN_GRANT_WINDOW_H__
#define __XEN_GRANT_WINDOW_H__

#include <xen/guest_access.h>
#include <xen/list.h>
#include <xen/spinlock.h>
#include <xen/time.h>
#include <xen/types.h>
#include <public/grant_window.h>

struct domain;

#ifdef CONFIG_GRANT_WINDOW

struct grant_window;

/* Bits of a handle that index granted[]. */
#define GRANT_WINDOWS_BITS 5
/* Most windows of a granter. */
#define GRANT_WINDOWS_MAX  (1u << GRANT_WINDOWS_BITS)

struct grant_windows {
    spinlock_t lock;
    /* As granter. */
    struct grant_window *granted[GRANT_WINDOWS_MAX];
    uint32_t serial;                 /* upper bits of the next handle */
    /* Flushes that the granter may cause now. */
    unsigned int tokens;
    s_time_t refilled;
    uint64_t issued, revoked, busy, flushes, throttled;
    /* As grantee. */
    /* Created for this domain, registered or not. */
    struct list_head held;
    unsigned int registered;
};

/* In grant_table.c, which owns struct grant_table. */
struct grant_windows *grant_windows(struct domain *d);

void grant_windows_init(struct grant_windows *ws);
long grant_window_op(unsigned int cmd, XEN_GUEST_HANDLE_PARAM(void) uop,
                     unsigned int count);
size_t grant_window_op_size(unsigned int cmd);
/*
 * Removes all windows of a domain that is dying or is reset. -ERESTART: call
 * again.
 */
int grant_window_release(struct domain *d);
/* Returns true while @d grants pages by a window or has one registered. */
bool grant_window_in_use(struct domain *d);

#else /* !CONFIG_GRANT_WINDOW */

struct grant_windows {};
static inline void grant_windows_init(struct grant_windows *ws) {}
static inline long grant_window_op(unsigned int cmd,
                                   XEN_GUEST_HANDLE_PARAM(void) uop,
                                   unsigned int count)
{
    return -ENOSYS;
}
static inline size_t grant_window_op_size(unsigned int cmd) { return 0; }
static inline int grant_window_release(struct domain *d) { return 0; }
static inline bool grant_window_in_use(struct domain *d) { return false; }

#endif /* CONFIG_GRANT_WINDOW */
#endif /* __XEN_GRANT_WINDOW_H__ */
