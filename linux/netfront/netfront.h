/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Types and functions of the Ringfence network frontend.
 *
 * The driver copies every packet between socket buffers and pages of its own. It grants these pages
 * once, when it connects, and revokes them when it disconnects. No packet issues or revokes a
 * grant, and the backend never reaches a page that holds anything but packets of this device. With
 * grant windows or staging no packet costs the backend a grant operation either: pages of windows
 * are mapped as soon as this driver issues them, and staging registers granted pages at the backend
 * over the control ring.
 *
 *   device.c    probe, remove, resume, backend states, network device operations, faults
 *   connect.c   features, store keys, set-up and teardown of all queues
 *   queue.c     one queue: rings, pages, event channels, NAPI
 *   tx.c rx.c   the two rings of a queue
 *   ctrl.c      control ring: one message at a time
 *   staging.c   ADD and DEL of pages; shrinker
 *   window.c    grant windows: create, issue, revoke, destroy
 *   mcast.c     multicast groups that the backend passes
 *   hash.c      hash configuration
 *   ethtool.c   statistics, channels, RSS
 *   pages.c     granted pages, and those of windows
 *
 * Locks, outermost first: rfn_dev.lock (connection), RTNL (queue array), rfn_ctrl.lock (control
 * ring), TX queue locks of the network device (producer side of a TX ring). NAPI alone consumes
 * responses.
 *
 * The backend is not trusted. Every value from it is copied once, then validated. A violation of
 * the protocol ends the connection with rfn_fault().
 */
#ifndef RINGFENCE_NETFRONT_H
#define RINGFENCE_NETFRONT_H

#include <linux/atomic.h>
#include <linux/completion.h>
#include <linux/etherdevice.h>
#include <linux/if_vlan.h>
#include <linux/mutex.h>
#include <linux/netdevice.h>
#include <linux/skbuff.h>
#include <linux/u64_stats_sync.h>
#include <linux/version.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <xen/events.h>
#include <xen/grant_table.h>
#include <xen/interface/io/netif.h>
#include <xen/interface/io/ring.h>
#include <xen/page.h>
#include <xen/xen.h>
#include <xen/xenbus.h>
#include "grant_window_calls.h"

#define RFN_NAME "ringfence-netfront"

/* Slots of a one-page TX or RX ring. */
#define RFN_RING 256
/* Longest packet to the backend: the size field has 16 bits. */
#define RFN_TX_BYTES_MAX XEN_NETIF_MAX_TX_SIZE
/* Slots of the longest packet, its extra infos included. */
#define RFN_TX_SLOTS_MAX (DIV_ROUND_UP(RFN_TX_BYTES_MAX, XEN_PAGE_SIZE) + 2)
/* Longest packet from the backend: 64 KiB behind an Ethernet header with a VLAN tag. */
#define RFN_RX_BYTES_MAX (65535 + VLAN_ETH_HLEN)
/* Longest chain of data slots from the backend. */
#define RFN_RX_SLOTS_MAX 64
/* Most extra infos of one packet. */
#define RFN_EXTRAS_MAX 8
#define RFN_QUEUES_MAX 16
/* MTU limit with a backend that takes one slot a packet. */
#define RFN_MTU_ONE_SLOT ETH_DATA_LEN

/* Control messages of staging grants, which the kernel's copy of netif.h lacks. */
#define RFN_CTRL_GET_GREF_MAPPING_SIZE 8
#define RFN_CTRL_ADD_GREF_MAPPING 9
#define RFN_CTRL_DEL_GREF_MAPPING 10

/* Entry of a list for ADD and DEL. */
struct rfn_gref {
	u32 ref;
	u16 flags;
#define RFN_GREF_READONLY 1
	u16 status;
};

/* Header-only staging: the first bytes of a packet, and the pages of a queue that hold them. */
#define RFN_HEAD 256
#define RFN_HEADS_PER_PAGE (XEN_PAGE_SIZE / RFN_HEAD)
#define RFN_HEAD_PAGES (RFN_RING / RFN_HEADS_PER_PAGE)
/* Ids of TX requests: the numbers of pages, then those of headers. */
#define RFN_TX_IDS (2 * RFN_RING)

/* TX pages that stay with a queue whatever the shrinker wants. */
#define RFN_TX_KEPT (4 * RFN_TX_SLOTS_MAX)

/*
 * Grant windows: the first reference that is not reserved, all references of a ring's window, and
 * their mark in a ring.
 */
#define RFN_WINDOW_FIRST 8
#define RFN_WINDOW_REFS (RFN_WINDOW_FIRST + RFN_RING)
#define RFN_WINDOW_MARK 0x80000000U

/* Multicast groups that a backend takes. */
#define RFN_GROUPS_MAX 64

/* Most pages of one list. A page holds 512 entries; a shorter list is a shorter wait. */
#define RFN_LIST_MAX 128

/* Page granted to the backend, or in a grant window. */
struct rfn_page {
	struct page *page;
	void *va;
	/* Reference in the ring's form: with RFN_WINDOW_MARK that of a window. */
	grant_ref_t ref;
	/* Set while the backend has the page in its staging table. */
	bool staged;
	/* Set while the backend may reach the page of a window. */
	bool issued;
};

/* Grant window of a ring's pages. */
struct rfn_window {
	struct rfn_dev *rd;
	struct rfn_page *page;
	u32 handle;
	bool open;
	bool readonly;
	/* Pages of the last batch that the backend said to be in use. */
	unsigned int busy;
};

/* Queue of free page numbers. One producer and one consumer need no lock. */
struct rfn_ids {
	u16 id[RFN_RING];
	u32 head;
	u32 tail;
};

/* State of a TX page between request and response. */
struct rfn_tx_slot {
	/* Packet that ends with this page, freed with the response. */
	struct sk_buff *skb;
	u32 busy;
	/* The request changes the multicast filter and is no packet. */
	bool filter;
};

/* Counters of one queue and direction. */
struct rfn_stats {
	struct u64_stats_sync sync;
	u64 packets;
	u64 bytes;
	u64 slots;
	u64 dropped;
	u64 errors;
	/* TX: slots in staged pages, and in pages of a window. RX: unused. */
	u64 staged;
	u64 issued;
	/* TX: queue stops. RX: packets without memory. */
	u64 starved;
	u64 gso;
	/* RX: packets whose TX response was an error, which NAPI counts. */
	u64 tx_refused;
};

enum rfn_queue_flags {
	RFN_Q_BROKEN,	/* The backend broke the protocol on this queue. */
};

struct rfn_dev;
struct rfn_queue;

/* Event channel of one ring or of both. */
struct rfn_channel {
	struct rfn_queue *q;
	/* The interrupt is masked until NAPI ends. */
	bool masked;
	unsigned int irq;
	evtchn_port_t port;
	char name[IFNAMSIZ + 12];
};

struct rfn_queue {
	struct rfn_dev *rd;
	unsigned int index;
	unsigned long flags;
	/* A poll since the last EOI has taken responses, so its event was no spurious one. */
	bool worked;
	struct napi_struct napi;
	/* The first is for the TX ring, the last for the RX ring. */
	struct rfn_channel channel[2];
	unsigned int channels;
	struct page_pool *pool;

	/* Producer side of the TX ring: under the queue's TX lock. */
	struct xen_netif_tx_front_ring tx ____cacheline_aligned_in_smp;
	u32 tx_published;
	atomic_t tx_extras;
	struct rfn_stats tx_stats;
	struct rfn_page tx_ring;
	struct rfn_page tx_page[RFN_RING];
	struct rfn_tx_slot tx_slot[RFN_TX_IDS];
	/* Free pages: first those that cost the backend nothing, which are staged or issued. */
	struct rfn_ids tx_plain;
	struct rfn_ids tx_ready;
	/* Grant windows of both rings, if the connection has them. */
	bool windows;
	/*
	 * RX pages may be posted: those of windows are issued, and the backend knows the hash
	 * configuration of the user.
	 */
	bool posting;
	struct rfn_window tx_window;
	struct rfn_window rx_window;
	/* Header-only staging, if `heads`: pages of packet headers, and free headers. */
	bool heads;
	/* All of these pages are staged: headers may be sent from them. */
	bool heads_staged;
	struct rfn_page head_page[RFN_HEAD_PAGES];
	struct rfn_ids tx_heads;

	/* RX ring: NAPI alone. */
	struct xen_netif_rx_front_ring rx ____cacheline_aligned_in_smp;
	struct rfn_stats rx_stats;
	struct rfn_page rx_ring;
	/* Page n belongs to slot n for good. */
	struct rfn_page rx_page[RFN_RING];
};

/* Features the backend offers. */
struct rfn_features {
	bool sg, gso4, gso6, csum4, csum6, ctrl, mcast, split;
	unsigned int queues;
};

/* Control ring. Messages go one at a time. */
struct rfn_ctrl {
	/* Guards the ring and the list page: one message at a time. */
	struct mutex lock;
	bool usable;
	/* Set to end a wait for a response. */
	bool dead;
	struct xen_netif_ctrl_front_ring ring;
	struct rfn_page ring_page;
	struct rfn_page list;
	wait_queue_head_t wait;
	unsigned int irq;
	evtchn_port_t port;
	u16 next_id;
};

#define RFN_HASH_KEY 40
#define RFN_HASH_TABLE 128

struct rfn_hash {
	bool configured;
	/* The key has a value, ours or the user's. */
	bool filled;
	u8 key[RFN_HASH_KEY];
	u32 table[RFN_HASH_TABLE];
};

/* Device-wide counters. */
enum rfn_event {
	RFN_EV_CONNECTS,
	RFN_EV_FAULTS,
	RFN_EV_CTRL_TIMEOUTS,
	RFN_EV_STAGING_REFUSED,
	RFN_EV_SHRUNK_PAGES,
	RFN_EV_MCAST_REFUSED,
	RFN_EV_ISSUES,
	RFN_EV_REVOKES,
	RFN_EV_FORCED,
	RFN_EV_WINDOWS_REFUSED,
	RFN_EV_LOST_PAGES,
	RFN_EVENTS,
};

/* Multicast filter of the backend in this connection. */
struct rfn_mcast {
	u8 group[RFN_GROUPS_MAX][ETH_ALEN] __aligned(2);
	unsigned int groups;
	/* The backend was asked to filter. */
	bool on;
	/* The backend refused a change: no filter in this connection. */
	bool refused;
};

struct rfn_dev {
	struct xenbus_device *xdev;
	struct net_device *ndev;
	/* Guards the connection: set-up, teardown, staging, windows. */
	struct mutex lock;
	struct rfn_features peer;

	/* Under RTNL, and `lock` to change. */
	struct rfn_queue **queue;
	unsigned int queues;
	bool connected;
	/* Packets may be sent: read without a lock, changed under all TX locks. */
	bool running;

	unsigned int queues_wanted;
	/* The backend has reached Connected in this connection. */
	bool peer_connected;
	/* This side has said Closing. */
	bool closing;
	/* Connects again once the backend has closed. */
	bool restarting;
	/* The driver lets go of the device. */
	bool leaving;
	struct xenbus_watch carrier_watch;
	bool carrier_watched;

	/* Guards the counters of earlier queues, and the queue array for readers of counters. */
	spinlock_t stats_lock;
	/* Sums of the queues that had the same index in earlier connections. */
	struct rtnl_link_stats64 stats_before[RFN_QUEUES_MAX];

	struct rfn_ctrl ctrl;
	struct rfn_hash hash;
	/* Under `lock`, but for `refused`. */
	struct rfn_mcast mcast;
	atomic_t staged;
	atomic_t issued;
	/* Pages of this connection are in grant windows. Under `lock`, as are the next four. */
	bool windows;
	/* The next connection has no windows, since those of this one failed. */
	bool windows_failed;
	/* Reason for which this connection has no windows. */
	const char *no_windows;
	/* The backend was reported to keep pages. */
	bool kept_pages;
	/* The windows were closed because the guest was to be suspended. */
	bool suspended;
	/* Staged or issued TX pages that the shrinker may take. */
	atomic_t tx_spare;
	atomic64_t event[RFN_EVENTS];

	const char *fault;
	unsigned int fault_queue;
	struct work_struct fault_work;
	struct work_struct restart_work;
	struct work_struct ready_work;
	struct work_struct shrink_work;
	struct work_struct thaw_work;
	struct delayed_work mcast_work;
	atomic_t shrink_wanted;
	struct list_head link;
};

/* Module parameters. */
extern bool rfn_windows;
extern bool rfn_staging;
extern bool rfn_staging_header;
extern bool rfn_multicast_control;
extern unsigned int rfn_staging_batch;

/* pages.c */
int rfn_page_alloc(struct rfn_page *p, domid_t peer, bool readonly);
int rfn_page_alloc_for_window(struct rfn_page *p, unsigned int number);
void rfn_page_free(struct rfn_dev *rd, struct rfn_page *p);

/* queue.c */
struct rfn_queue *rfn_queue_create(struct rfn_dev *rd, unsigned int index);
void rfn_queue_destroy(struct rfn_queue *q);
void rfn_queue_enable(struct rfn_queue *q);
void rfn_queue_disable(struct rfn_queue *q);
void rfn_queue_post(struct rfn_queue *q);

/* tx.c */
netdev_tx_t rfn_start_xmit(struct sk_buff *skb, struct net_device *ndev);
void rfn_tx_init(struct rfn_queue *q);
void rfn_tx_issued(struct rfn_queue *q);
void rfn_tx_complete(struct rfn_queue *q, int budget);
bool rfn_tx_final_check(struct rfn_queue *q);
void rfn_tx_drop_all(struct rfn_queue *q);
bool rfn_tx_filter(struct rfn_queue *q, bool add, const u8 *group);
unsigned int rfn_tx_withdraw(struct rfn_queue *q, u16 *ids, unsigned int most);

/* rx.c */
void rfn_rx_init(struct rfn_queue *q);
int rfn_rx_poll(struct rfn_queue *q, int budget);
bool rfn_rx_final_check(struct rfn_queue *q);

/* ctrl.c */
int rfn_ctrl_create(struct rfn_dev *rd);
void rfn_ctrl_destroy(struct rfn_dev *rd);
void rfn_ctrl_kill(struct rfn_dev *rd);
int rfn_ctrl_message(struct rfn_dev *rd, u16 type, u32 data0, u32 data1, u32 data2, u32 *answer);

/* staging.c */
void rfn_stage_all(struct rfn_dev *rd);
void rfn_unstage_all(struct rfn_dev *rd);
void rfn_shrink_work(struct work_struct *work);
int rfn_shrinker_register(void);
void rfn_shrinker_unregister(void);
void rfn_shrinker_add(struct rfn_dev *rd);
void rfn_shrinker_del(struct rfn_dev *rd);

/* window.c */
const char *rfn_windows_refused(struct rfn_dev *rd);
int rfn_windows_issue(struct rfn_dev *rd);
void rfn_windows_close(struct rfn_dev *rd);
int rfn_window_create(struct rfn_window *w, struct rfn_dev *rd, struct rfn_page *pages,
		      bool readonly);
void rfn_window_revoke(struct rfn_window *w, const u16 *ids, unsigned int count);
void rfn_window_close(struct rfn_window *w);

/* mcast.c */
void rfn_mcast_changed(struct net_device *ndev);
void rfn_mcast_work(struct work_struct *work);

/* hash.c */
void rfn_hash_fill_key(struct rfn_dev *rd);
void rfn_hash_fill_table(struct rfn_dev *rd, unsigned int queues);
int rfn_hash_apply(struct rfn_dev *rd);

/* connect.c */
int rfn_connect(struct rfn_dev *rd);
void rfn_disconnect(struct rfn_dev *rd);
void rfn_stop_sending(struct rfn_dev *rd);
void rfn_start_sending(struct rfn_dev *rd);
void rfn_forget_keys(struct rfn_dev *rd);
void rfn_watch_carrier(struct rfn_dev *rd);
void rfn_unwatch_carrier(struct rfn_dev *rd);

/* device.c */
void rfn_fault(struct rfn_dev *rd, unsigned int queue, const char *why);

/* ethtool.c */
extern const struct ethtool_ops rfn_ethtool_ops;
void rfn_set_stat_ops(struct net_device *ndev);
void rfn_queue_stats(const struct rfn_queue *q, struct rtnl_link_stats64 *sum);
void rfn_index_stats(const struct rfn_dev *rd, unsigned int index, struct rtnl_link_stats64 *sum);

static inline void rfn_count(struct rfn_dev *rd, enum rfn_event event)
{
	atomic64_inc(&rd->event[event]);
}

/* Returns true for a page of a grant window, issued or not. */
static inline bool rfn_page_in_window(const struct rfn_page *p)
{
	return p->ref & RFN_WINDOW_MARK;
}

static inline u32 rfn_ids_count(const struct rfn_ids *ids)
{
	/* Pairs with rfn_ids_put() and rfn_ids_fill(): the numbers are there. */
	return smp_load_acquire(&ids->tail) - READ_ONCE(ids->head);
}

/* Takes a number. The caller has checked rfn_ids_count(). */
static inline u16 rfn_ids_take(struct rfn_ids *ids)
{
	u16 id = ids->id[ids->head % RFN_RING];

	WRITE_ONCE(ids->head, ids->head + 1);
	return id;
}

/*
 * Puts the numbers of all pages at once into an empty queue: none is taken, and given back, before
 * all are there.
 */
static inline void rfn_ids_fill(struct rfn_ids *ids)
{
	u32 i;

	for (i = 0; i < RFN_RING; i++)
		ids->id[(ids->tail + i) % RFN_RING] = i;
	/* Pairs with rfn_ids_count(). */
	smp_store_release(&ids->tail, ids->tail + RFN_RING);
}

static inline void rfn_ids_put(struct rfn_ids *ids, u16 id)
{
	ids->id[ids->tail % RFN_RING] = id;
	/* Pairs with rfn_ids_count(). */
	smp_store_release(&ids->tail, ids->tail + 1);
}

#endif
