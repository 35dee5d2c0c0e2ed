/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Grant windows: grants that the granter issues and revokes without the
 * grantee's help.
 *
 * Life of a window: created by the granter (a handle, no memory of note),
 * registered by the grantee (frame range, table, arrays), closing (nothing is
 * issued any more, batches of entries are removed), retired. Destruction by
 * either side and the death of either domain take the same path.
 *
 * Locks, outermost first: grant_windows.lock of the domain with the lower id,
 * that of the other domain, window lock, p2m lock of one domain. The window
 * lock is held through the flush of a batch. The granter's pages are looked up
 * before it is taken.
 *
 * A linked window holds references to both domains. grant_window_release()
 * unlinks all windows of a dying domain, so these references do not keep a dead
 * domain.
 *
 * Invariants: what is mapped is what @page says; the table in the grantee's
 * memory is written and, but for the status word, never read. A page is
 * released after the flush of the batch that removed it, or never.
 */
#include <xen/err.h>
#include <xen/event.h>
#include <xen/grant_window.h>
#include <xen/guest_access.h>
#include <xen/hypercall.h>
#include <xen/keyhandler.h>
#include <xen/mm.h>
#include <xen/nospec.h>
#include <xen/paging.h>
#include <xen/param.h>
#include <xen/perfc.h>
#include <xen/sched.h>
#include <xen/vmap.h>
#include <public/grant_table.h>
#include <xsm/xsm.h>
#include <asm/p2m.h>
#include <asm/p2m-window.h>

#define ENTRIES_MAX       4096u   /* references of a window */
#define REGISTERED_MAX    128u    /* registered windows of a grantee */
/* Entries between two checks for preemption; they share one flush. */
#define BATCH             64u
#define SLOTS_PER_PAGE    (PAGE_SIZE / sizeof(struct gnttab_window_slot))
#define TABLE_PAGES_MAX   (ENTRIES_MAX / SLOTS_PER_PAGE)

/*
 * Revoke batches a second that a granter may make: each costs the grantee a TLB
 * flush.
 */
static unsigned int __read_mostly opt_flush_rate = 16384;
integer_param("gnttab_window_flush_rate", opt_flush_rate);

/* Low bits of an entry of grant_window.page. */
/* Holds a writable type reference (PV granter). */
#define E_TYPED    1UL
#define E_WRITABLE 2UL
#define E_GOING    4UL            /* in the batch that is being revoked */
#define E_REMOVED  8UL            /* removed, but the IOMMU failed to flush */
#define E_FLAGS    15UL

enum state { CREATED, REGISTERED, CLOSING };

struct grant_window {
    struct list_head held;        /* in the grantee's list */
    struct domain *granter, *grantee;
    uint32_t handle;
    unsigned int nr;
    /* Counted by the grantee; under its grant_windows.lock. */
    bool registered;
    atomic_t refs;

    spinlock_t lock;              /* everything below */
    enum state state;
    gfn_t base;
    /* Frames of the range that register has checked so far. */
    unsigned int prepared;
    unsigned int issued;
    /* References below this one are not issued (while closing). */
    unsigned int drained;
    uint32_t generation;
    /* By reference: page_info and E_* flags, or 0. */
    unsigned long *page;
    /* By reference: the entry word in the grantee's slot. */
    uint32_t *word;
    struct gnttab_window_slot *slot;
    struct page_info *table[TABLE_PAGES_MAX];
};

static struct page_info *entry_page(unsigned long e)
{
    return (struct page_info *)(e & ~E_FLAGS);
}

void grant_windows_init(struct grant_windows *ws)
{
    spin_lock_init(&ws->lock);
    INIT_LIST_HEAD(&ws->held);
    ws->tokens = opt_flush_rate;
    ws->refilled = NOW();
}

static void lock_both(struct domain *a, struct domain *b)
{
    ASSERT(a != b);
    if ( a->domain_id > b->domain_id )
        SWAP(a, b);
    spin_lock(&grant_windows(a)->lock);
    spin_lock(&grant_windows(b)->lock);
}

static void unlock_both(struct domain *a, struct domain *b)
{
    spin_unlock(&grant_windows(a)->lock);
    spin_unlock(&grant_windows(b)->lock);
}

/* Returns a window by its granter's handle, with a reference. */
static struct grant_window *window_get(struct domain *granter, uint32_t handle)
{
    struct grant_windows *ws = grant_windows(granter);
    struct grant_window *w;

    spin_lock(&ws->lock);
    w = ws->granted[array_index_nospec(handle % GRANT_WINDOWS_MAX,
                                       GRANT_WINDOWS_MAX)];
    if ( w && w->handle == handle )
        atomic_inc(&w->refs);
    else
        w = NULL;
    spin_unlock(&ws->lock);

    return w;
}

static void window_put(struct grant_window *w)
{
    if ( !atomic_dec_and_test(&w->refs) )
        return;
    ASSERT(!w->issued && !w->slot);
    put_domain(w->granter);
    put_domain(w->grantee);
    xfree(w);
}

/* Takes one flush from the granter's budget. */
static bool may_flush(struct grant_windows *ws)
{
    /* A rate of 0 would keep every page for ever. */
    unsigned int rate = max(1U, opt_flush_rate);
    s_time_t now;
    bool may;

    spin_lock(&ws->lock);
    now = NOW();
    if ( now - ws->refilled >= SECONDS(1) )
    {
        ws->tokens = rate;
        ws->refilled = now;
    }
    else
    {
        unsigned int earned =
            rate * (uint64_t)(now - ws->refilled) / SECONDS(1);

        ws->tokens = min(rate, ws->tokens + earned);
        /* The time of a part of a flush counts for the next one. */
        ws->refilled += earned * SECONDS(1) / rate;
    }
    may = ws->tokens;
    if ( may )
        ws->tokens--;
    spin_unlock(&ws->lock);

    return may;
}

static void release_page(const struct grant_window *w, unsigned long e)
{
    struct page_info *pg = entry_page(e);

    if ( e & E_WRITABLE )
        paging_mark_dirty(w->granter, page_to_mfn(pg));
    if ( e & E_TYPED )
        put_page_type(pg);
    put_page(pg);
}

/*
 * Removes up to BATCH entries from the grantee's physmap with one flush and
 * releases their pages. An entry that cannot be removed or flushed keeps its
 * page; the caller must then crash the grantee. Another call tries again.
 */
static int remove_entries(struct grant_window *w, const uint32_t *refs,
                          unsigned int n)
{
    struct grant_windows *ws = grant_windows(w->granter);
    struct p2m_window_batch b;
    unsigned int i;
    int rc, failed = 0;

    ASSERT(spin_is_locked(&w->lock));
    if ( !n )
        return 0;
    p2m_window_begin(&b, w->grantee);
    for ( i = 0; i < n; i++ )
    {
        unsigned long *e = &w->page[refs[i]];

        if ( *e & E_REMOVED )
        {
            p2m_window_flush_again(&b, gfn_add(w->base, refs[i]));
            continue;
        }
        rc = p2m_window_remove(&b, gfn_add(w->base, refs[i]),
                               page_to_mfn(entry_page(*e)));
        if ( rc )
            failed = rc;
        else
            *e |= E_REMOVED;
    }
    rc = p2m_window_end(&b);
    if ( rc )
        return rc;
    if ( b.flushed )
    {
        perfc_incr(window_flushes);
        ws->flushes++;
    }
    for ( i = 0; i < n; i++ )
    {
        unsigned long e = w->page[refs[i]];

        if ( !(e & E_REMOVED) )
            continue;
        w->page[refs[i]] = 0;
        w->issued--;
        ws->revoked++;
        perfc_incr(window_revokes);
        release_page(w, e);
    }

    return failed;
}

/*
 * Stops a grantee that keeps, or may keep, a translation of a page that was
 * revoked.
 */
static void stop_grantee(const struct grant_window *w, int rc)
{
    printk(XENLOG_G_ERR
           "%pd: window %#x of %pd: a page cannot be unmapped: %d\n",
           w->grantee, w->handle, w->granter, rc);
    domain_crash(w->grantee);
}

/*
 * Removes at most BATCH entries of a closing window. Returns true when nothing
 * is left.
 */
static bool drain(struct grant_window *w)
{
    uint32_t refs[BATCH];
    unsigned int n = 0, i;
    bool empty;
    int rc = 0;

    spin_lock(&w->lock);
    w->state = CLOSING;
    for ( ; w->issued && w->drained < w->nr && n < BATCH; w->drained++ )
        if ( w->page[w->drained] )
        {
            refs[n++] = w->drained;
            write_atomic(&w->slot[w->drained].entry, 0);
        }
    if ( n )
        rc = remove_entries(w, refs, n);
    /*
     * One more attempt; a page that still may be reached is lost to its
     * granter.
     */
    if ( rc )
        rc = remove_entries(w, refs, n);
    for ( i = 0; rc && i < n; i++ )
        if ( w->page[refs[i]] )
        {
            w->page[refs[i]] = 0;
            w->issued--;
        }
    empty = !w->issued;
    spin_unlock(&w->lock);
    if ( rc )
        stop_grantee(w, rc);

    return empty;
}

/*
 * Unlinks an empty window from both domains and releases its memory, but for
 * those who still hold a reference.
 */
static void retire(struct grant_window *w)
{
    struct grant_window **link =
        &grant_windows(w->granter)->granted[w->handle % GRANT_WINDOWS_MAX];
    struct gnttab_window_slot *slot;
    unsigned long *page;
    uint32_t *word;
    bool linked;
    unsigned int i;

    lock_both(w->granter, w->grantee);
    linked = *link == w;
    if ( linked )
    {
        *link = NULL;
        list_del(&w->held);
        if ( w->registered )
            grant_windows(w->grantee)->registered--;
    }
    unlock_both(w->granter, w->grantee);
    if ( !linked )
        return;
    spin_lock(&w->lock);
    ASSERT(w->state == CLOSING && !w->issued);
    slot = w->slot;
    page = w->page;
    word = w->word;
    w->slot = NULL;
    w->page = NULL;
    w->word = NULL;
    spin_unlock(&w->lock);
    if ( slot )
        vunmap(slot);
    for ( i = 0; i < TABLE_PAGES_MAX && w->table[i]; i++ )
        put_page_and_type(w->table[i]);
    vfree(page);
    vfree(word);
    window_put(w);
}

/* Closes a window by batches; -ERESTART when it is time to let others run. */
static int close_window(struct grant_window *w)
{
    while ( !drain(w) )
        if ( hypercall_preempt_check() )
            return -ERESTART;
    retire(w);

    return 0;
}

/* Returns a window that the domain has a part in, with a reference. */
static struct grant_window *any_window(struct domain *d)
{
    struct grant_windows *ws = grant_windows(d);
    struct grant_window *w = NULL;
    unsigned int i;

    spin_lock(&ws->lock);
    for ( i = 0; !w && i < GRANT_WINDOWS_MAX; i++ )
        w = ws->granted[i];
    if ( !w )
        w = list_first_entry_or_null(&ws->held, struct grant_window, held);
    if ( w )
        atomic_inc(&w->refs);
    spin_unlock(&ws->lock);

    return w;
}

int grant_window_release(struct domain *d)
{
    struct grant_window *w;

    /* A domain whose creation failed has no grant table. */
    if ( !d->grant_table )
        return 0;
    while ( (w = any_window(d)) != NULL )
    {
        int rc = close_window(w);

        window_put(w);
        if ( rc || hypercall_preempt_check() )
            return -ERESTART;
    }

    return 0;
}

bool grant_window_in_use(struct domain *d)
{
    struct grant_windows *ws = grant_windows(d);
    unsigned int i;
    bool used;

    spin_lock(&ws->lock);
    used = ws->registered;
    for ( i = 0; !used && i < GRANT_WINDOWS_MAX; i++ )
        used = ws->granted[i];
    spin_unlock(&ws->lock);

    return used;
}

/* Gives the window a handle and links it to both domains. */
static int16_t link(struct grant_window *w)
{
    struct grant_windows *ws = grant_windows(w->granter);
    unsigned int i;
    int16_t status = GNTST_no_space;

    lock_both(w->granter, w->grantee);
    /*
     * The teardown of the grantee takes the lock after it set is_dying: it
     * finds the window, or is seen here.
     */
    if ( w->grantee->is_dying )
        status = GNTST_bad_domain;
    else
        for ( i = 0; i < GRANT_WINDOWS_MAX; i++ )
            if ( !ws->granted[i] )
            {
                /*
                 * A handle is not used again soon: a late issue must not reach
                 * another grantee.
                 */
                w->handle = (ws->serial++ << GRANT_WINDOWS_BITS) | i;
                ws->granted[i] = w;
                list_add_tail(&w->held, &grant_windows(w->grantee)->held);
                status = GNTST_okay;
                break;
            }
    unlock_both(w->granter, w->grantee);

    return status;
}

static int16_t create(struct gnttab_window_create *op)
{
    struct domain *ld = current->domain, *rd;
    struct grant_window *w;
    int16_t status;

    if ( op->pad )
        return GNTST_general_error;
    if ( !op->nr_entries || op->nr_entries > ENTRIES_MAX )
        return GNTST_no_space;
    if ( p2m_window_dirty_tracking(ld) )
        return GNTST_eagain;
    rd = get_domain_by_id(op->grantee);
    if ( !rd )
        return GNTST_bad_domain;
    if ( rd == ld || !p2m_window_supported(rd) )
        status = GNTST_bad_domain;
    else if ( xsm_grant_mapref(XSM_HOOK, rd, ld, GNTMAP_readonly) )
        status = GNTST_permission_denied;
    else
        status = GNTST_okay;
    w = status ? NULL : xzalloc(struct grant_window);
    if ( !status && !w )
        status = GNTST_no_space;
    if ( status )
        goto no_window;

    get_knownalive_domain(ld);
    w->granter = ld;
    w->grantee = rd;
    w->nr = op->nr_entries;
    w->state = CREATED;
    spin_lock_init(&w->lock);
    INIT_LIST_HEAD(&w->held);
    atomic_set(&w->refs, 2);           /* one of the links, one of ours */
    status = link(w);
    if ( status )
        atomic_set(&w->refs, 1);
    op->handle = w->handle;
    window_put(w);
    return status;

 no_window:
    put_domain(rd);
    return status;
}

/* Resources that register collects before it commits. */
struct registration {
    struct page_info *table[TABLE_PAGES_MAX];
    unsigned int nr_table;
    struct gnttab_window_slot *slot;
    unsigned long *page;
    uint32_t *word;
};

static void abandon(struct registration *r)
{
    if ( r->slot )
        vunmap(r->slot);
    while ( r->nr_table )
        put_page_and_type(r->table[--r->nr_table]);
    vfree(r->page);
    vfree(r->word);
}

/* Pins and maps the grantee's table and allocates the window's arrays. */
static int16_t collect(struct registration *r,
                       const struct gnttab_window_register *op)
{
    struct domain *ld = current->domain;
    XEN_GUEST_HANDLE(uint64_t) gfns = { _p(op->table_gfns) };
    unsigned int i, nr = DIV_ROUND_UP(op->nr_entries, SLOTS_PER_PAGE);
    mfn_t mfns[TABLE_PAGES_MAX];

    for ( i = 0; i < nr; i++ )
    {
        uint64_t gfn;
        p2m_type_t t;
        struct page_info *pg;

        if ( copy_from_guest_offset(&gfn, gfns, i, 1) ||
             check_get_page_from_gfn(ld, _gfn(gfn), false, &t, &pg) )
            return GNTST_bad_page;
        if ( page_get_owner(pg) != ld || !p2m_is_ram(t) ||
             is_special_page(pg) || !get_page_type(pg, PGT_writable_page) )
        {
            put_page(pg);
            return GNTST_bad_page;
        }
        r->table[r->nr_table++] = pg;
        mfns[i] = page_to_mfn(pg);
    }
    r->page = vzalloc(op->nr_entries * sizeof(*r->page));
    r->word = vzalloc(op->nr_entries * sizeof(*r->word));
    r->slot = vmap(mfns, nr);
    if ( !r->page || !r->word || !r->slot )
        return GNTST_no_space;
    memset(r->slot, 0, nr * PAGE_SIZE);

    return GNTST_okay;
}

/*
 * Returns true if the range is free of other windows of the grantee, whose lock
 * is held.
 */
static bool is_free(struct grant_windows *ws, uint64_t base, unsigned int nr)
{
    const struct grant_window *w;

    list_for_each_entry ( w, &ws->held, held )
        if ( w->registered && gfn_x(w->base) < base + nr &&
             base < gfn_x(w->base) + w->nr )
            return false;
    return true;
}

static int16_t commit(struct grant_window *w, struct registration *r,
                      uint64_t base)
{
    struct grant_windows *ws = grant_windows(w->grantee);
    int16_t status = GNTST_okay;

    spin_lock(&ws->lock);
    spin_lock(&w->lock);
    if ( w->state != CREATED )
        status = GNTST_bad_handle;
    else if ( ws->registered >= REGISTERED_MAX )
        status = GNTST_no_space;
    else if ( !is_free(ws, base, w->nr) )
        status = GNTST_bad_virt_addr;
    else
    {
        memcpy(w->table, r->table, sizeof(w->table));
        w->slot = r->slot;
        w->page = r->page;
        w->word = r->word;
        w->base = _gfn(base);
        w->registered = true;
        ws->registered++;
        w->state = REGISTERED;
        *r = (struct registration){};
    }
    spin_unlock(&w->lock);
    spin_unlock(&ws->lock);

    return status;
}

/*
 * Checks the frame range, one page table at a time. What it did so far is kept
 * for a continuation.
 */
static int prepare(struct grant_window *w, uint64_t base)
{
    const unsigned int block = 1u << PAGETABLE_ORDER;
    int rc = 0;

    for ( ; ; )
    {
        unsigned int n;

        spin_lock(&w->lock);
        if ( w->state != CREATED )
            rc = -ENOENT;
        else if ( !w->prepared || gfn_x(w->base) != base )
        {
            w->base = _gfn(base);
            w->prepared = 0;
        }
        n = min(w->nr - w->prepared,
                block - (unsigned int)((base + w->prepared) % block));
        if ( !rc && n )
            rc = p2m_window_prepare(w->grantee, _gfn(base + w->prepared), n);
        if ( !rc )
            w->prepared += n;
        spin_unlock(&w->lock);
        if ( rc || !n )
            return rc;
        if ( hypercall_preempt_check() )
            return -ERESTART;
    }
}

static int do_register(struct gnttab_window_register *op)
{
    struct domain *ld = current->domain, *rd;
    struct grant_window *w = NULL;
    struct registration r = {};
    int rc = 0;

    op->status = GNTST_general_error;
    if ( op->pad || !p2m_window_supported(ld) )
        return 0;
    op->status = GNTST_bad_virt_addr;
    if ( !op->nr_entries || op->nr_entries > ENTRIES_MAX ||
         op->base_gfn + op->nr_entries < op->base_gfn ||
         !gfn_valid(ld, _gfn(op->base_gfn + op->nr_entries - 1)) )
        return 0;
    op->status = GNTST_eagain;
    if ( p2m_window_dirty_tracking(ld) )
        return 0;
    op->status = GNTST_bad_domain;
    rd = rcu_lock_domain_by_id(op->granter);
    if ( !rd )
        return 0;
    op->status = GNTST_permission_denied;
    if ( xsm_grant_mapref(XSM_HOOK, ld, rd, GNTMAP_readonly) )
        goto out;
    op->status = GNTST_bad_handle;
    w = window_get(rd, op->handle);
    if ( !w || w->grantee != ld || w->nr != op->nr_entries )
        goto out;
    rc = prepare(w, op->base_gfn);
    if ( rc == -ERESTART )
        goto out;
    op->status = !rc ? GNTST_okay : rc == -ENOENT ? GNTST_bad_handle :
                 rc == -ENOMEM ? GNTST_no_space : GNTST_bad_virt_addr;
    rc = 0;
    if ( op->status )
        goto out;
    op->status = collect(&r, op);
    if ( !op->status )
        op->status = commit(w, &r, op->base_gfn);
    abandon(&r);

 out:
    if ( w )
        window_put(w);
    rcu_unlock_domain(rd);
    return rc;
}

static int destroy(struct gnttab_window_destroy *op)
{
    struct domain *ld = current->domain, *rd;
    struct grant_window *w;
    int rc = 0;

    op->status = GNTST_bad_domain;
    rd = rcu_lock_domain_by_any_id(op->granter);
    if ( !rd )
        return 0;
    op->status = GNTST_bad_handle;
    w = window_get(rd, op->handle);
    if ( w && (w->granter == ld || w->grantee == ld) )
    {
        rc = close_window(w);
        op->status = GNTST_okay;
    }
    if ( w )
        window_put(w);
    rcu_unlock_domain(rd);

    return rc;
}

/*
 * Takes the granter's page that is to be issued, with the references that an
 * issued entry holds; or a status.
 */
static int16_t take_page(const struct grant_window *w,
                         const struct gnttab_window_issue *op, unsigned long *e)
{
    struct domain *ld = w->granter;
    bool ro = op->flags & GNTWIN_readonly;
    struct page_info *pg;
    p2m_type_t t;
    int rc;

    if ( op->pad || (op->flags & ~GNTWIN_readonly) )
        return GNTST_general_error;
    if ( op->ref >= w->nr )
        return GNTST_bad_gntref;
    if ( xsm_grant_mapref(XSM_HOOK, w->grantee, ld, ro ? GNTMAP_readonly : 0) )
        return GNTST_permission_denied;
    rc = check_get_page_from_gfn(ld, _gfn(op->gfn), ro, &t, &pg);
    if ( rc )
        return rc == -EAGAIN ? GNTST_eagain : GNTST_bad_page;
    /*
     * The hypervisor's own pages (grant table, shared info) and pages of others
     * are not the granter's to give. A page that is read-only to the granter
     * itself must not become writable through a window.
     */
    if ( page_get_owner(pg) != ld || is_special_page(pg) || !p2m_is_ram(t) ||
         (!ro && p2m_is_readonly(t) && t != p2m_ram_logdirty) )
        goto bad;
    /* A page table of a PV guest must not be written by another domain. */
    if ( !ro && !paging_mode_external(ld) &&
         !get_page_type(pg, PGT_writable_page) )
        goto bad;
    *e = (unsigned long)pg | (ro ? 0 : E_WRITABLE) |
         (ro || paging_mode_external(ld) ? 0 : E_TYPED);
    return GNTST_okay;

 bad:
    put_page(pg);
    return GNTST_bad_page;
}

/*
 * Issues one page; the window lock is held and the batch begun. Keeps the page
 * only if it returns GNTST_okay.
 */
static int16_t issue_one(struct grant_window *w, struct p2m_window_batch *b,
                         uint32_t ref, unsigned long e, int *fatal)
{
    int rc;

    ref = array_index_nospec(ref, w->nr);
    if ( w->page[ref] )
        return GNTST_bad_gntref;
    rc = p2m_window_add(b, gfn_add(w->base, ref), page_to_mfn(entry_page(e)),
                        !(e & E_WRITABLE));
    if ( rc == -EILSEQ )
        *fatal = rc;                /* it may be mapped: keep the page */
    else if ( rc )
        return rc == -ENOMEM ? GNTST_no_space : GNTST_general_error;
    w->page[ref] = e;
    w->word[ref] = (++w->generation << 2) | (e & E_WRITABLE ? 2 : 0) | 1;
    w->issued++;
    grant_windows(w->granter)->issued++;
    perfc_incr(window_issues);
    return GNTST_okay;
}

/* Issues up to BATCH pages by one window. */
static void issue(struct grant_window *w, struct gnttab_window_issue *op,
                  unsigned int n)
{
    unsigned long e[BATCH];
    struct p2m_window_batch b;
    unsigned int i;
    int rc, fatal = 0;

    for ( i = 0; i < n; i++ )
    {
        e[i] = 0;
        op[i].status = take_page(w, &op[i], &e[i]);
    }
    spin_lock(&w->lock);
    if ( w->state == REGISTERED && p2m_window_supported(w->grantee) )
    {
        p2m_window_begin(&b, w->grantee);
        for ( i = 0; i < n; i++ )
            if ( !op[i].status )
                op[i].status = issue_one(w, &b, op[i].ref, e[i], &fatal);
        rc = p2m_window_end(&b);
        if ( rc && !fatal )
            fatal = rc;
        /* The grantee learns of a page after it can reach it. */
        smp_wmb();
        for ( i = 0; i < n; i++ )
            if ( !op[i].status )
                write_atomic(&w->slot[op[i].ref].entry, w->word[op[i].ref]);
    }
    else
        for ( i = 0; i < n; i++ )
            if ( !op[i].status )
                op[i].status = w->state == CREATED ? GNTST_eagain :
                               w->state == CLOSING ? GNTST_bad_handle :
                                                     GNTST_general_error;
    spin_unlock(&w->lock);
    for ( i = 0; i < n && !fatal; i++ )
        if ( e[i] && op[i].status )
            release_page(w, e[i] & ~E_WRITABLE);
    if ( fatal )
        stop_grantee(w, fatal);
}

/* Revokes up to BATCH references of one window. */
static void revoke(struct grant_window *w, struct gnttab_window_revoke *op,
                   unsigned int n)
{
    uint32_t refs[BATCH];
    uint8_t of[BATCH];
    unsigned int i, k = 0, m = 0;
    bool throttled = !may_flush(grant_windows(w->granter));
    int rc;

    spin_lock(&w->lock);
    for ( i = 0; i < n; i++ )
    {
        uint32_t ref = op[i].ref;

        op[i].status = GNTST_general_error;
        if ( op[i].pad || (op[i].flags & ~GNTWIN_force) )
            continue;
        op[i].status = GNTST_bad_gntref;
        if ( w->state == CREATED || ref >= w->nr )
            continue;
        /*
         * A closing window is revoked from as usual; one that is gone has no
         * page mapped.
         */
        op[i].status = GNTST_bad_handle;
        if ( !w->page )
            continue;
        op[i].status = GNTST_bad_gntref;
        ref = array_index_nospec(ref, w->nr);
        if ( !w->page[ref] )
            continue;
        /*
         * Named twice in a batch, or removed without a flush: may still be
         * mapped.
         */
        op[i].status = GNTST_general_error;
        if ( w->page[ref] & (E_GOING | E_REMOVED) )
            continue;
        op[i].status = GNTST_eagain;
        if ( throttled )
            continue;
        w->page[ref] |= E_GOING;
        write_atomic(&w->slot[ref].entry, 0);
        refs[k] = ref;
        of[k++] = i;
    }
    /*
     * Pairs with the grantee's barrier between raising its status word and
     * reading the entry.
     */
    smp_mb();
    for ( i = 0; i < k; i++ )
    {
        if ( !(op[of[i]].flags & GNTWIN_force) &&
             read_atomic(&w->slot[refs[i]].status) )
        {
            w->page[refs[i]] &= ~E_GOING;
            write_atomic(&w->slot[refs[i]].entry, w->word[refs[i]]);
            op[of[i]].status = GNTST_busy;
            grant_windows(w->granter)->busy++;
            perfc_incr(window_busy);
            continue;
        }
        op[of[i]].status = GNTST_okay;
        refs[m++] = refs[i];
    }
    if ( throttled )
    {
        grant_windows(w->granter)->throttled++;
        perfc_incr(window_throttled);
    }
    rc = remove_entries(w, refs, m);
    /* An entry that was not removed keeps its page; a later drain retries. */
    for ( i = 0; rc && i < m; i++ )
        w->page[refs[i]] &= ~E_GOING;
    spin_unlock(&w->lock);
    if ( !rc )
        return;
    for ( i = 0; i < k; i++ )
        if ( !op[of[i]].status )
            op[of[i]].status = GNTST_general_error;
    stop_grantee(w, rc);
}

/*
 * Runs an array of issue or revoke operations. Returns how many are done when
 * preempted, else 0 or an error.
 */
static long do_batches(unsigned int cmd, XEN_GUEST_HANDLE_PARAM(char) p,
                       unsigned int count)
{
    union {
        struct gnttab_window_issue issue[BATCH];
        struct gnttab_window_revoke revoke[BATCH];
    } op;
    const bool is_issue = cmd == GNTTABOP_window_issue;
    const size_t size = grant_window_op_size(cmd);
    unsigned int i, j, n;

    for ( i = 0; i < count; i += n )
    {
        struct grant_window *w;
        uint32_t handle;

        if ( i && hypercall_preempt_check() )
            return i;
        n = min(count - i, BATCH);
        if ( copy_from_guest_offset((char *)&op, p, i * size, n * size) )
            return -EFAULT;
        handle = is_issue ? op.issue[0].handle : op.revoke[0].handle;
        for ( j = 1; j < n; j++ )
        {
            uint32_t next = is_issue ? op.issue[j].handle : op.revoke[j].handle;

            if ( next != handle )
                break;
        }
        n = j;
        w = window_get(current->domain, handle);
        for ( j = 0; !w && j < n; j++ )
            *(is_issue ? &op.issue[j].status : &op.revoke[j].status) =
                GNTST_bad_handle;
        if ( w )
        {
            if ( is_issue )
                issue(w, op.issue, n);
            else
                revoke(w, op.revoke, n);
            window_put(w);
        }
        if ( copy_to_guest_offset(p, i * size, (char *)&op, n * size) )
            return -EFAULT;
    }

    return 0;
}

size_t grant_window_op_size(unsigned int cmd)
{
    return cmd == GNTTABOP_window_issue ? sizeof(struct gnttab_window_issue) :
                                          sizeof(struct gnttab_window_revoke);
}

/* Runs an operation that takes one structure. */
static long do_single(unsigned int cmd, XEN_GUEST_HANDLE_PARAM(char) p)
{
    union {
        struct gnttab_window_query query;
        struct gnttab_window_create create;
        struct gnttab_window_register reg;
        struct gnttab_window_destroy destroy;
    } op = {};
    size_t size = sizeof(op.query);
    long rc = 0;

    if ( cmd == GNTTABOP_window_create )
        size = sizeof(op.create);
    else if ( cmd == GNTTABOP_window_register )
        size = sizeof(op.reg);
    else if ( cmd == GNTTABOP_window_destroy )
        size = sizeof(op.destroy);
    if ( copy_from_guest((char *)&op, p, size) )
        return -EFAULT;
    switch ( cmd )
    {
    case GNTTABOP_window_query:
        op.query = (struct gnttab_window_query){
            .version = GNTWIN_VERSION,
            .max_entries = ENTRIES_MAX,
            .max_windows = GRANT_WINDOWS_MAX,
            .max_registered = REGISTERED_MAX,
            .flush_rate = opt_flush_rate,
            .batch = BATCH,
        };
        break;

    case GNTTABOP_window_create:
        op.create.status = create(&op.create);
        break;

    case GNTTABOP_window_register:
        rc = do_register(&op.reg);
        break;

    case GNTTABOP_window_destroy:
        rc = destroy(&op.destroy);
        break;
    }
    if ( rc )
        return rc;

    return copy_to_guest(p, (char *)&op, size) ? -EFAULT : 0;
}

long grant_window_op(unsigned int cmd, XEN_GUEST_HANDLE_PARAM(void) uop,
                     unsigned int count)
{
    XEN_GUEST_HANDLE_PARAM(char) p = guest_handle_cast(uop, char);

    switch ( cmd )
    {
    case GNTTABOP_window_query:
    case GNTTABOP_window_create:
    case GNTTABOP_window_register:
    case GNTTABOP_window_destroy:
        return count == 1 ? do_single(cmd, p) : -EINVAL;

    case GNTTABOP_window_issue:
    case GNTTABOP_window_revoke:
        if ( !guest_handle_okay(p, (unsigned long)count *
                                   grant_window_op_size(cmd)) )
            return -EFAULT;
        return do_batches(cmd, p, count);
    }

    return -ENOSYS;
}

static void dump_window(const struct grant_window *w)
{
    static const char *const states[] = { "created", "registered", "closing" };

    printk("    window %#x to %pd: %u entries, %u issued, %s at gfn %#lx, "
           "%d references\n",
           w->handle, w->grantee, w->nr, w->issued, states[w->state],
           gfn_x(w->base), atomic_read(&w->refs));
}

static void cf_check dump(unsigned char key)
{
    struct domain *d;
    unsigned int i;

    printk("'%c' pressed -> dumping grant windows\n", key);
    rcu_read_lock(&domlist_read_lock);
    for_each_domain ( d )
    {
        struct grant_windows *ws = grant_windows(d);

        if ( !spin_trylock(&ws->lock) )
        {
            printk("  %pd: in use\n", d);
            continue;
        }
        if ( ws->issued || ws->registered )
            printk("  %pd: %u registered; %"PRIu64" issued, "
                   "%"PRIu64" revoked, %"PRIu64" busy, "
                   "%"PRIu64" flushes, %"PRIu64" throttled\n",
                   d, ws->registered, ws->issued, ws->revoked, ws->busy,
                   ws->flushes, ws->throttled);
        for ( i = 0; i < GRANT_WINDOWS_MAX; i++ )
            if ( ws->granted[i] )
                dump_window(ws->granted[i]);
        spin_unlock(&ws->lock);
    }
    rcu_read_unlock(&domlist_read_lock);
}

static int __init cf_check grant_window_init(void)
{
    register_keyhandler('y', dump, "dump grant windows", 1);
    return 0;
}
__initcall(grant_window_init);
