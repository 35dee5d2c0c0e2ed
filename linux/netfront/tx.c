// SPDX-License-Identifier: GPL-2.0-only
/*
 * TX ring: packets to the backend.
 *
 * rfn_start_xmit() copies a packet into free pages, staged and issued ones first, and posts one
 * request for each page; the number of the page is the id of the request. NAPI takes the responses:
 * it returns the pages and frees the packet. With header-only staging the first 256 bytes of a
 * packet lie in a staged page that many packets share, and the rest in pages that are not staged.
 *
 * Responses name pages by ids from the backend. An id is accepted only while its page is in flight,
 * and a slot is marked in flight only after the sender has touched the packet for the last time.
 */
#include "netfront.h"

/* Initialises ring and free pages. Pages of a window are free when they are issued. */
void rfn_tx_init(struct rfn_queue *q)
{
	struct xen_netif_tx_sring *sring = q->tx_ring.va;
	u16 i;

	SHARED_RING_INIT(sring);
	FRONT_RING_INIT(&q->tx, sring, XEN_PAGE_SIZE);
	if (!q->windows)
		rfn_ids_fill(&q->tx_plain);
	for (i = 0; q->heads && i < RFN_RING; i++)
		rfn_ids_put(&q->tx_heads, RFN_RING + i);
}

/* Lets senders have the pages of the window, which are issued. */
void rfn_tx_issued(struct rfn_queue *q)
{
	rfn_ids_fill(&q->tx_ready);
}

/* Returns the number of slots that can be posted with a page each. */
static u32 rfn_tx_room(struct rfn_queue *q)
{
	u32 ring = RFN_RING - (q->tx.req_prod_pvt - READ_ONCE(q->tx.rsp_cons));
	u32 pages = rfn_ids_count(&q->tx_plain) + rfn_ids_count(&q->tx_ready);

	return min(ring, pages);
}

static void rfn_tx_publish(struct rfn_queue *q)
{
	int notify;

	/* Before the shared index: NAPI compares responses with it. */
	WRITE_ONCE(q->tx_published, q->tx.req_prod_pvt);
	RING_PUSH_REQUESTS_AND_CHECK_NOTIFY(&q->tx, notify);
	if (notify)
		notify_remote_via_irq(q->channel[0].irq);
}

static void rfn_tx_post_gso(struct rfn_queue *q, const struct sk_buff *skb)
{
	const struct skb_shared_info *info = skb_shinfo(skb);
	struct xen_netif_extra_info extra = {
		.type = XEN_NETIF_EXTRA_TYPE_GSO,
		.u.gso.size = info->gso_size,
		.u.gso.type = info->gso_type & SKB_GSO_TCPV6 ? XEN_NETIF_GSO_TYPE_TCPV6 :
							       XEN_NETIF_GSO_TYPE_TCPV4,
	};

	atomic_inc(&q->tx_extras);
	memcpy(RING_GET_REQUEST(&q->tx, q->tx.req_prod_pvt), &extra, sizeof(extra));
	q->tx.req_prod_pvt++;
}

static u16 rfn_tx_flags(const struct sk_buff *skb)
{
	if (skb->ip_summed == CHECKSUM_PARTIAL)
		return XEN_NETTXF_csum_blank | XEN_NETTXF_data_validated;
	return skb->ip_summed == CHECKSUM_UNNECESSARY ? XEN_NETTXF_data_validated : 0;
}

/* Place for a part of a packet. */
struct rfn_place {
	const struct rfn_page *page;
	u16 id;
	u16 offset;
	u16 room;
};

/* Takes a free place; the caller has checked that there is one. */
static struct rfn_place rfn_tx_take(struct rfn_queue *q, bool head)
{
	bool ready = rfn_ids_count(&q->tx_ready) > 0;
	u16 id, number;

	if (!head) {
		id = rfn_ids_take(ready ? &q->tx_ready : &q->tx_plain);
		return (struct rfn_place){ &q->tx_page[id], id, 0, XEN_PAGE_SIZE };
	}
	id = rfn_ids_take(&q->tx_heads);
	number = id - RFN_RING;
	return (struct rfn_place){ &q->head_page[number / RFN_HEADS_PER_PAGE], id,
				   number % RFN_HEADS_PER_PAGE * RFN_HEAD, RFN_HEAD };
}

/* Returns true if the beginning of the packet goes into a staged page of headers. */
static bool rfn_tx_has_head(struct rfn_queue *q, const struct sk_buff *skb)
{
	/* Pairs with rfn_stage(), which publishes the state of the pages. */
	return smp_load_acquire(&q->heads_staged) && rfn_ids_count(&q->tx_heads) &&
	       (skb->len <= RFN_HEAD || q->rd->peer.sg);
}

/* Returns the number of slots with bytes of the packet. */
static unsigned int rfn_tx_slots(const struct sk_buff *skb, bool head)
{
	unsigned int first = head ? min_t(unsigned int, skb->len, RFN_HEAD) : 0;

	return head + DIV_ROUND_UP(skb->len - first, XEN_PAGE_SIZE);
}

/*
 * Copies the packet and writes its requests, without publishing them. Returns the number of places
 * in `ids`.
 */
static unsigned int rfn_tx_post(struct rfn_queue *q, struct sk_buff *skb, bool head, u16 *ids)
{
	unsigned int slots = rfn_tx_slots(skb, head), i, at = 0;
	bool gso = skb_is_gso(skb);
	u32 staged = 0, issued = 0;

	for (i = 0; i < slots; i++) {
		struct rfn_place place = rfn_tx_take(q, head && !i);
		unsigned int len = min_t(unsigned int, skb->len - at, place.room);
		struct xen_netif_tx_request request = {
			.gref = place.page->ref,
			.offset = place.offset,
			.flags = i + 1 < slots ? XEN_NETTXF_more_data : 0,
			.id = place.id,
			.size = i ? len : skb->len,
		};

		/* Fails for a malformed packet only, which then goes out as zeros. */
		if (WARN_ON_ONCE(skb_copy_bits(skb, at, place.page->va + place.offset, len)))
			memset(place.page->va + place.offset, 0, len);
		ids[i] = place.id;
		at += len;
		staged += place.page->staged;
		issued += place.page->issued;
		if (!i)
			request.flags |= rfn_tx_flags(skb) | (gso ? XEN_NETTXF_extra_info : 0);
		memcpy(RING_GET_REQUEST(&q->tx, q->tx.req_prod_pvt), &request, sizeof(request));
		q->tx.req_prod_pvt++;
		if (!i && gso)
			rfn_tx_post_gso(q, skb);
	}
	u64_stats_update_begin(&q->tx_stats.sync);
	q->tx_stats.packets++;
	q->tx_stats.bytes += skb->len;
	q->tx_stats.slots += slots;
	q->tx_stats.staged += staged;
	q->tx_stats.issued += issued;
	q->tx_stats.gso += gso;
	u64_stats_update_end(&q->tx_stats.sync);
	return slots;
}

static void rfn_tx_count_drop(struct rfn_queue *q)
{
	u64_stats_update_begin(&q->tx_stats.sync);
	q->tx_stats.dropped++;
	u64_stats_update_end(&q->tx_stats.sync);
}

/*
 * Stops the queue while the longest packet may not fit; NAPI starts it again. Returns true if it is
 * stopped.
 */
static bool rfn_tx_stop_if_full(struct rfn_queue *q, struct netdev_queue *txq)
{
	if (rfn_tx_room(q) >= RFN_TX_SLOTS_MAX)
		return false;
	netif_tx_stop_queue(txq);
	/* Pairs with the barrier in rfn_tx_complete(): one of both sees the other. */
	smp_mb();
	if (rfn_tx_room(q) >= RFN_TX_SLOTS_MAX) {
		netif_tx_start_queue(txq);
		return false;
	}
	u64_stats_update_begin(&q->tx_stats.sync);
	q->tx_stats.starved++;
	u64_stats_update_end(&q->tx_stats.sync);
	return true;
}

netdev_tx_t rfn_start_xmit(struct sk_buff *skb, struct net_device *ndev)
{
	struct rfn_dev *rd = netdev_priv(ndev);
	unsigned int index = skb_get_queue_mapping(skb), slots, need, len, i;
	struct netdev_queue *txq;
	struct rfn_queue *q;
	u16 ids[RFN_TX_SLOTS_MAX];
	bool stopped, head;

	if (unlikely(!READ_ONCE(rd->running) || index >= rd->queues)) {
		dev_core_stats_tx_dropped_inc(ndev);
		dev_kfree_skb_any(skb);
		return NETDEV_TX_OK;
	}
	q = rd->queue[index];
	txq = netdev_get_tx_queue(ndev, index);
	head = rfn_tx_has_head(q, skb);
	need = rfn_tx_slots(skb, head) + skb_is_gso(skb);
	if (unlikely(skb->len < ETH_HLEN || skb->len > RFN_TX_BYTES_MAX ||
		     (need > 1 && !rd->peer.sg)))
		goto drop;
	if (unlikely(rfn_tx_room(q) < need)) {
		/* The queue is stopped before it is this full: a packet without warning waits. */
		netif_tx_stop_queue(txq);
		/* Pairs with the barrier in rfn_tx_complete(): one of both sees the other. */
		smp_mb();
		if (rfn_tx_room(q) < need)
			return NETDEV_TX_BUSY;
		netif_tx_start_queue(txq);
	}
	slots = rfn_tx_post(q, skb, head, ids);
	skb_tx_timestamp(skb);
	len = skb->len;
	stopped = rfn_tx_stop_if_full(q, txq);
	stopped |= __netdev_tx_sent_queue(txq, len, netdev_xmit_more());
	q->tx_slot[ids[slots - 1]].skb = skb;
	/* From here on a response may free the packet. */
	for (i = 0; i < slots; i++)
		/* Pairs with rfn_tx_response(). */
		smp_store_release(&q->tx_slot[ids[i]].busy, 1);
	if (stopped || !netdev_xmit_more())
		rfn_tx_publish(q);
	return NETDEV_TX_OK;
drop:
	rfn_tx_count_drop(q);
	dev_kfree_skb_any(skb);
	if (!netdev_xmit_more() && q->tx_published != q->tx.req_prod_pvt)
		rfn_tx_publish(q);
	return NETDEV_TX_OK;
}

/*
 * Posts a request that adds a group to the backend's multicast filter, or removes it. Returns false
 * if there is no room or the queue is not running. Called without locks of the queue.
 */
bool rfn_tx_filter(struct rfn_queue *q, bool add, const u8 *group)
{
	struct netdev_queue *txq = netdev_get_tx_queue(q->rd->ndev, q->index);
	struct xen_netif_extra_info extra = {
		.type = add ? XEN_NETIF_EXTRA_TYPE_MCAST_ADD : XEN_NETIF_EXTRA_TYPE_MCAST_DEL,
	};
	struct rfn_place place;
	bool posted;

	memcpy(extra.u.mcast.addr, group, ETH_ALEN);
	__netif_tx_lock_bh(txq);
	posted = READ_ONCE(q->rd->running) && rfn_tx_room(q) >= 2;
	if (posted) {
		struct xen_netif_tx_request request = { .flags = XEN_NETTXF_extra_info };

		place = rfn_tx_take(q, false);
		request.gref = place.page->ref;
		request.id = place.id;
		memcpy(RING_GET_REQUEST(&q->tx, q->tx.req_prod_pvt), &request, sizeof(request));
		memcpy(RING_GET_REQUEST(&q->tx, q->tx.req_prod_pvt + 1), &extra, sizeof(extra));
		q->tx.req_prod_pvt += 2;
		atomic_inc(&q->tx_extras);
		q->tx_slot[place.id].filter = true;
		/* Pairs with rfn_tx_response(). */
		smp_store_release(&q->tx_slot[place.id].busy, 1);
		rfn_tx_publish(q);
		rfn_tx_stop_if_full(q, txq);
	}
	__netif_tx_unlock_bh(txq);
	return posted;
}

/* Returns a place to its list. NAPI only. */
static void rfn_tx_put(struct rfn_queue *q, u16 id)
{
	if (id >= RFN_RING)
		rfn_ids_put(&q->tx_heads, id);
	else
		rfn_ids_put(q->windows || q->tx_page[id].staged ? &q->tx_ready : &q->tx_plain, id);
}

/*
 * The backend's list of groups is full, or it takes no changes: the filter ends with this
 * connection.
 */
static void rfn_tx_filter_refused(struct rfn_queue *q)
{
	rfn_count(q->rd, RFN_EV_MCAST_REFUSED);
	WRITE_ONCE(q->rd->mcast.refused, true);
	schedule_delayed_work(&q->rd->mcast_work, 0);
}

/* Takes one response. Returns the reason if it breaks the protocol. */
static const char *rfn_tx_response(struct rfn_queue *q,
				   const struct xen_netif_tx_response *response, int budget,
				   unsigned int *packets, unsigned int *bytes)
{
	struct rfn_tx_slot *slot;
	struct sk_buff *skb;
	bool filter;

	if (response->status == XEN_NETIF_RSP_NULL)
		return atomic_dec_if_positive(&q->tx_extras) < 0 ?
		       "a TX response to an extra info that was not sent" : NULL;
	/* Pairs with the release of the busy mark: the sender's writes to the slot are visible. */
	if (response->id >= RFN_TX_IDS || !smp_load_acquire(&q->tx_slot[response->id].busy))
		return "a TX response with an id that is not in flight";
	slot = &q->tx_slot[response->id];
	skb = slot->skb;
	slot->skb = NULL;
	filter = slot->filter;
	slot->filter = false;
	WRITE_ONCE(slot->busy, 0);
	rfn_tx_put(q, response->id);
	if (filter && response->status != XEN_NETIF_RSP_OKAY)
		rfn_tx_filter_refused(q);
	if (response->status != XEN_NETIF_RSP_OKAY && skb) {
		/* NAPI writes the RX counters, senders the TX counters. */
		u64_stats_update_begin(&q->rx_stats.sync);
		q->rx_stats.tx_refused++;
		u64_stats_update_end(&q->rx_stats.sync);
	}
	if (skb) {
		*packets += 1;
		*bytes += skb->len;
		napi_consume_skb(skb, budget);
	}
	return NULL;
}

/* Takes all responses, and starts the queue if there is room again. NAPI only. */
void rfn_tx_complete(struct rfn_queue *q, int budget)
{
	struct netdev_queue *txq = netdev_get_tx_queue(q->rd->ndev, q->index);
	unsigned int packets = 0, bytes = 0;
	u32 cons = q->tx.rsp_cons, prod = READ_ONCE(q->tx.sring->rsp_prod);

	if (test_bit(RFN_Q_BROKEN, &q->flags))
		return;
	/* Reads entries, and the published index, after the producer index. */
	virt_rmb();
	if (unlikely(prod - cons > READ_ONCE(q->tx_published) - cons)) {
		set_bit(RFN_Q_BROKEN, &q->flags);
		rfn_fault(q->rd, q->index, "the TX response index is beyond the requests");
		return;
	}
	for (; cons != prod; cons++) {
		struct xen_netif_tx_response response;
		const char *why;

		RING_COPY_RESPONSE(&q->tx, cons, &response);
		why = rfn_tx_response(q, &response, budget, &packets, &bytes);
		if (unlikely(why)) {
			set_bit(RFN_Q_BROKEN, &q->flags);
			rfn_fault(q->rd, q->index, why);
			break;
		}
	}
	WRITE_ONCE(q->tx.rsp_cons, cons);
	netdev_tx_completed_queue(txq, packets, bytes);
	/* Pairs with the barrier in rfn_tx_stop_if_full(). */
	smp_mb();
	if (netif_tx_queue_stopped(txq) && READ_ONCE(q->rd->running) &&
	    rfn_tx_room(q) >= RFN_TX_SLOTS_MAX)
		netif_tx_wake_queue(txq);
}

/* Asks for an event for the next response. Returns true if there is one already. */
bool rfn_tx_final_check(struct rfn_queue *q)
{
	int more;

	RING_FINAL_CHECK_FOR_RESPONSES(&q->tx, more);
	return more;
}

/* Frees the packets that have no response. The connection has ended. */
void rfn_tx_drop_all(struct rfn_queue *q)
{
	int i;

	for (i = 0; i < RFN_TX_IDS; i++) {
		dev_kfree_skb_any(q->tx_slot[i].skb);
		q->tx_slot[i].skb = NULL;
	}
}

/*
 * Takes up to `most` free pages that are staged or issued out of circulation, and leaves enough
 * pages for two packets of the longest kind. Called under the queue's TX lock.
 */
unsigned int rfn_tx_withdraw(struct rfn_queue *q, u16 *ids, unsigned int most)
{
	u32 free = rfn_ids_count(&q->tx_plain) + rfn_ids_count(&q->tx_ready);
	unsigned int n = 0;

	if (free <= 2 * RFN_TX_SLOTS_MAX)
		return 0;
	most = min3(most, free - 2 * RFN_TX_SLOTS_MAX, rfn_ids_count(&q->tx_ready));
	while (n < most)
		ids[n++] = rfn_ids_take(&q->tx_ready);
	return n;
}
