/* SPDX-License-Identifier: GPL-2.0-only */
/* Physmap side of grant windows (arch/x86/mm/p2m-window.c). */
#ifndef __ASM_X86_P2M_WINDOW_H__
#define __ASM_X86_P2M_WINDOW_H__

#include <xen/mm-frame.h>
#include <xen/types.h>

struct domain;

/* Changes to one domain's window entries under one hold of its p2m lock. */
struct p2m_window_batch {
    struct domain *d;
    unsigned long low, high;       /* range of frame numbers that changed */
    unsigned int iommu_flags;
    bool flushed;
};

bool p2m_window_supported(const struct domain *d);
bool p2m_window_dirty_tracking(const struct domain *d);
int p2m_window_prepare(struct domain *d, gfn_t gfn, unsigned int nr);
void p2m_window_begin(struct p2m_window_batch *b, struct domain *d);
int p2m_window_add(struct p2m_window_batch *b, gfn_t gfn, mfn_t mfn, bool ro);
int p2m_window_remove(struct p2m_window_batch *b, gfn_t gfn, mfn_t mfn);
void p2m_window_flush_again(struct p2m_window_batch *b, gfn_t gfn);
int p2m_window_end(struct p2m_window_batch *b);

#endif /* __ASM_X86_P2M_WINDOW_H__ */
