/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Physmap side of grant windows: puts pages of a granter into the grantee's
 * physmap and removes them, a batch at a time. A batch holds the p2m lock,
 * makes one TLB flush and one IOMMU flush at its end, and only if it removed
 * something (or the IOMMU asks for a flush after an addition).
 */
#include <xen/grant_window.h>
#include <xen/iommu.h>
#include <xen/ioreq.h>
#include <xen/perfc.h>
#include <xen/sched.h>
#include <asm/altp2m.h>
#include <asm/flushtlb.h>
#include <asm/hvm/nestedhvm.h>
#include <asm/p2m.h>
#include <asm/p2m-window.h>

#include "mm-locks.h"

/*
 * Returns true if windows work in this domain's physmap: hardware-assisted
 * paging with one host p2m.
 */
bool p2m_window_supported(const struct domain *d)
{
    return is_hvm_domain(d) && hap_enabled(d) && !nestedhvm_enabled(d) &&
           !altp2m_active(d);
}

/* Returns true while a toolstack tracks all pages that the domain dirties. */
bool p2m_window_dirty_tracking(const struct domain *d)
{
    return paging_mode_log_dirty(d) &&
           (!is_hvm_domain(d) || p2m_is_global_logdirty(d));
}

/*
 * Prepares frames of one page table (an aligned block of 512) for a window:
 * they must be holes, and their page table is allocated now, so that issuing a
 * page never finds the grantee's p2m pool empty.
 */
int p2m_window_prepare(struct domain *d, gfn_t gfn, unsigned int nr)
{
    struct p2m_domain *p2m = p2m_get_hostp2m(d);
    unsigned int i;
    int rc = 0;

    p2m_lock(p2m);
    for ( i = 0; !rc && i < nr; i++ )
    {
        p2m_type_t t;
        p2m_access_t a;

        p2m->get_entry(p2m, gfn_add(gfn, i), &t, &a, 0, NULL, NULL);
        if ( !p2m_is_hole(t) || p2m_is_paging(t) )
            rc = -EBUSY;
    }
    if ( !rc )
        rc = p2m_set_entry(p2m, gfn, INVALID_MFN, PAGE_ORDER_4K, p2m_invalid,
                           p2m->default_access);
    p2m_unlock(p2m);

    return rc;
}

void p2m_window_begin(struct p2m_window_batch *b, struct domain *d)
{
    struct p2m_domain *p2m = p2m_get_hostp2m(d);

    *b = (struct p2m_window_batch){ .d = d, .low = ~0UL };
    p2m_lock(p2m);
    p2m->window_batch = true;
    p2m->window_flush = false;
    ASSERT(!this_cpu(iommu_dont_flush_iotlb));
    this_cpu(iommu_dont_flush_iotlb) = true;
}

static void changed(struct p2m_window_batch *b, gfn_t gfn,
                    unsigned int iommu_flags)
{
    b->low = min(b->low, gfn_x(gfn));
    b->high = max(b->high, gfn_x(gfn));
    b->iommu_flags |= iommu_flags;
}

/*
 * Puts a page at a frame number that is a hole; -EBUSY if the grantee has put
 * something else there.
 */
int p2m_window_add(struct p2m_window_batch *b, gfn_t gfn, mfn_t mfn, bool ro)
{
    struct p2m_domain *p2m = p2m_get_hostp2m(b->d);
    p2m_type_t t;
    p2m_access_t a;
    int rc;

    p2m->get_entry(p2m, gfn, &t, &a, 0, NULL, NULL);
    if ( !p2m_is_hole(t) || p2m_is_paging(t) )
        return -EBUSY;
    changed(b, gfn, IOMMU_FLUSHF_added);
    rc = p2m_set_entry(p2m, gfn, mfn, PAGE_ORDER_4K,
                       ro ? p2m_window_ro : p2m_window_rw, p2m->default_access);
    if ( !rc )
        return 0;
    /* The entry may be in the CPU's tables although the IOMMU refused it. */
    p2m->get_entry(p2m, gfn, &t, &a, 0, NULL, NULL);
    if ( p2m_is_window(t) && p2m_window_remove(b, gfn, mfn) )
        return -EILSEQ;
    return rc;
}

/*
 * Has the batch flush a frame that an earlier batch changed, and failed to
 * flush.
 */
void p2m_window_flush_again(struct p2m_window_batch *b, gfn_t gfn)
{
    changed(b, gfn, IOMMU_FLUSHF_modified);
}

/* Removes a page. It may still be reached through TLBs until the batch ends. */
int p2m_window_remove(struct p2m_window_batch *b, gfn_t gfn, mfn_t mfn)
{
    struct p2m_domain *p2m = p2m_get_hostp2m(b->d);
    p2m_type_t t;
    p2m_access_t a;
    mfn_t was = p2m->get_entry(p2m, gfn, &t, &a, 0, NULL, NULL);

    if ( !p2m_is_window(t) || !mfn_eq(was, mfn) )
        return -EILSEQ;
    changed(b, gfn, IOMMU_FLUSHF_modified);
    return p2m_set_entry(p2m, gfn, INVALID_MFN, PAGE_ORDER_4K, p2m_invalid,
                         p2m->default_access);
}

/*
 * Ends a batch. On success no TLB and no IOTLB has a translation that the batch
 * removed. Sets b->flushed if that took a flush of the CPUs. On failure of the
 * IOMMU the removed pages must not be released.
 */
int p2m_window_end(struct p2m_window_batch *b)
{
    struct p2m_domain *p2m = p2m_get_hostp2m(b->d);
    int rc = 0;

    this_cpu(iommu_dont_flush_iotlb) = false;
    p2m->window_batch = false;
    b->flushed = p2m->window_flush || p2m->need_flush;
    if ( p2m->window_flush )
    {
        p2m->window_flush = false;
        guest_flush_tlb_mask(b->d, b->d->dirty_cpumask);
    }
    p2m_unlock(p2m);        /* flushes EPT translations */
    if ( b->iommu_flags )
        rc = iommu_iotlb_flush(b->d, _dfn(b->low), b->high - b->low + 1,
                               b->iommu_flags);
    if ( b->iommu_flags & IOMMU_FLUSHF_modified )
        ioreq_request_mapcache_invalidate(b->d);

    return rc;
}
