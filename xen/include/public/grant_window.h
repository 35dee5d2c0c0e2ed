/* SPDX-License-Identifier: MIT */
/*
 * Grant windows: grants that the granter issues and revokes without the
 * grantee's help.
 *
 * A window is an array of references from one domain (the granter) to another
 * (the grantee). The grantee registers a range of unpopulated guest frame
 * numbers once. Issuing puts a page of the granter at frame base + ref of that
 * range; revoking removes it. A reference that is not issued reads as all ones,
 * and writes to it are discarded.
 *
 * All structures have the same layout for 32-bit and 64-bit callers. Reserved
 * fields must be zero.
 *
 * The operations are sub-operations of HYPERVISOR_grant_table_op. A hypervisor
 * without grant windows returns -ENOSYS for each of them, so window_query is
 * the probe.
 */
#ifndef __XEN_PUBLIC_GRANT_WINDOW_H__
#define __XEN_PUBLIC_GRANT_WINDOW_H__

#define GNTTABOP_window_query    0x40   /* either side, one structure */
#define GNTTABOP_window_create   0x41   /* granter, one structure */
#define GNTTABOP_window_register 0x42   /* grantee, one structure */
#define GNTTABOP_window_issue    0x43   /* granter, array */
#define GNTTABOP_window_revoke   0x44   /* granter, array */
#define GNTTABOP_window_destroy  0x45   /* either side, one structure */

#define GNTWIN_VERSION 1

/*
 * Status in addition to those of grant_table.h: the grantee's status word says
 * that the page is in use.
 */
#define GNTST_busy (-14)

struct gnttab_window_query {
    uint32_t version;        /* out: GNTWIN_VERSION */
    uint32_t max_entries;    /* out: references a window may have */
    uint32_t max_windows;    /* out: windows a granter may have */
    uint32_t max_registered; /* out: windows a grantee may have registered */
    /* out: revoke batches a second a granter may make */
    uint32_t flush_rate;
    uint32_t batch;          /* out: revocations that share one flush */
};

struct gnttab_window_create {
    uint16_t grantee;        /* in */
    int16_t status;          /* out: GNTST_* */
    uint32_t nr_entries;     /* in */
    /* out: valid between this granter and this grantee */
    uint32_t handle;
    uint32_t pad;
};

/*
 * Entry of a window's table. The table is in the grantee's memory. The
 * hypervisor writes @entry for the grantee's information and never reads it.
 * The grantee raises @status (not 0) while it uses the page.
 *
 * To use a page: raise @status, full barrier, read @entry. If it is not issued,
 * lower @status again.
 */
struct gnttab_window_slot {
    /* 0: not issued, else generation << 2 | writable << 1 | 1. */
    uint32_t entry;
    uint32_t status;
};

struct gnttab_window_register {
    uint16_t granter;        /* in */
    int16_t status;          /* out */
    uint32_t handle;         /* in */
    /* in: nr_entries unpopulated frame numbers start here */
    uint64_t base_gfn;
    /* in: address of uint64_t[]: the frames of the table, 512 slots each */
    uint64_t table_gfns;
    uint32_t nr_entries;     /* in: the granter's number */
    uint32_t pad;
};

/* The grantee's writes to the page are discarded. */
#define GNTWIN_readonly 1u

struct gnttab_window_issue {
    uint32_t handle;         /* in */
    uint32_t ref;            /* in: not issued */
    /* in: a page of the granter (PV: its machine frame number) */
    uint64_t gfn;
    uint32_t flags;          /* in: GNTWIN_readonly */
    int16_t status;          /* out */
    uint16_t pad;
};

#define GNTWIN_force 1u      /* revoke even if the status word is raised */

struct gnttab_window_revoke {
    uint32_t handle;         /* in */
    uint32_t ref;            /* in: issued */
    uint32_t flags;          /* in: GNTWIN_force */
    /* out: GNTST_busy, GNTST_eagain (over the flush rate: retry), ... */
    int16_t status;
    uint16_t pad;
};

struct gnttab_window_destroy {
    uint16_t granter;        /* in: DOMID_SELF if the caller is the granter */
    int16_t status;          /* out */
    uint32_t handle;         /* in */
};

#endif /* __XEN_PUBLIC_GRANT_WINDOW_H__ */
