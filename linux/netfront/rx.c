// SPDX-License-Identifier: GPL-2.0-only
/*
 * RX ring: packets from the backend.
 *
 * Slot n of the ring belongs to page n. A packet is a chain of responses: the first data slot,
 * extra infos, further data slots. The driver copies and validates the whole chain, copies the
 * bytes into a new packet, and posts the same pages again. The backend may change a page at any
 * time; nothing reads it after the copy.
 */
#include "netfront.h"
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
#include <net/page_pool/helpers.h>
#else
#include <net/page_pool.h>
#endif

/* Packets up to this length lie in the linear part; of a longer packet its first bytes. */
#define RFN_RX_LINEAR_MAX 1792
#define RFN_RX_HEADER 256

/* Validated data slot. */
struct rfn_piece {
	u16 slot;
	u16 offset;
	u16 len;
};

/* Validated chain of one packet. */
struct rfn_chain {
	struct rfn_piece piece[RFN_RX_SLOTS_MAX];
	unsigned int pieces;
	unsigned int slots;
	unsigned int bytes;
	u16 flags;
	u16 gso_size;
	u8 gso_type;
	bool hashed;
	u8 hash_type;
	u32 hash;
	/* The backend reports an error, or an extra info is unusable. */
	bool failed;
};

static void rfn_rx_publish(struct rfn_queue *q)
{
	int notify;

	RING_PUSH_REQUESTS_AND_CHECK_NOTIFY(&q->rx, notify);
	if (notify)
		notify_remote_via_irq(q->channel[q->channels - 1].irq);
}

/* Posts the page of each slot whose response was consumed, once RX pages may be posted. */
static void rfn_rx_post(struct rfn_queue *q)
{
	u32 end = q->rx.rsp_cons + RFN_RING;

	/* Pairs with rfn_queue_post(): pages are issued before they are posted. */
	if (!smp_load_acquire(&q->posting))
		return;
	while (q->rx.req_prod_pvt != end) {
		u16 slot = q->rx.req_prod_pvt % RFN_RING;
		struct xen_netif_rx_request request = { .id = slot, .gref = q->rx_page[slot].ref };

		memcpy(RING_GET_REQUEST(&q->rx, q->rx.req_prod_pvt), &request, sizeof(request));
		q->rx.req_prod_pvt++;
	}
}

/*
 * Initialises the ring with every page posted that may be. The backend looks at it once it
 * connects.
 */
void rfn_rx_init(struct rfn_queue *q)
{
	struct xen_netif_rx_sring *sring = q->rx_ring.va;

	SHARED_RING_INIT(sring);
	FRONT_RING_INIT(&q->rx, sring, XEN_PAGE_SIZE);
	rfn_rx_post(q);
	RING_PUSH_REQUESTS(&q->rx);
}

/* Returns the entry of the ring as an extra info. */
static const struct xen_netif_extra_info *rfn_rx_extra_info(const struct rfn_queue *q, u32 at)
{
	return (const struct xen_netif_extra_info *)RING_GET_RESPONSE(&q->rx, at);
}

static void rfn_rx_extra(struct rfn_chain *chain, const struct xen_netif_extra_info *extra)
{
	switch (extra->type) {
	case XEN_NETIF_EXTRA_TYPE_GSO:
		chain->gso_size = extra->u.gso.size;
		chain->gso_type = extra->u.gso.type;
		if (!chain->gso_size || (chain->gso_type != XEN_NETIF_GSO_TYPE_TCPV4 &&
					 chain->gso_type != XEN_NETIF_GSO_TYPE_TCPV6))
			chain->failed = true;
		break;
	case XEN_NETIF_EXTRA_TYPE_HASH:
		chain->hashed = extra->u.hash.algorithm == XEN_NETIF_CTRL_HASH_ALGORITHM_TOEPLITZ;
		chain->hash_type = extra->u.hash.type;
		memcpy(&chain->hash, extra->u.hash.value, sizeof(chain->hash));
		le32_to_cpus(&chain->hash);
		break;
	default:
		/* Nothing else was negotiated: it carries nothing the packet needs. */
		break;
	}
}

/*
 * Copies one chain out of the ring. Returns its slots, 0 if it is not complete yet, or a negative
 * number.
 */
static int rfn_rx_chain(struct rfn_queue *q, u32 prod, struct rfn_chain *chain, const char **why)
{
	u32 first = q->rx.rsp_cons, at = first;
	struct xen_netif_rx_response response;
	unsigned int extras = 0;

	chain->pieces = 0;
	chain->bytes = 0;
	chain->gso_size = 0;
	chain->hashed = false;
	chain->failed = false;
	for (;;) {
		struct rfn_piece *piece = &chain->piece[chain->pieces];
		u16 slot = at % RFN_RING;

		if (at == prod)
			return 0;
		RING_COPY_RESPONSE(&q->rx, at, &response);
		at++;
		*why = "an RX response with the id of another slot";
		if (response.id != slot)
			return -EPROTO;
		*why = "an RX response beyond its page";
		if (response.status > 0 && response.offset + response.status > XEN_PAGE_SIZE)
			return -EPROTO;
		if (response.status < 0)
			chain->failed = true;
		*piece = (struct rfn_piece){ slot, response.offset,
					     max_t(s16, response.status, 0) };
		chain->bytes += piece->len;
		if (!chain->pieces++) {
			bool more = response.flags & XEN_NETRXF_extra_info;

			chain->flags = response.flags;
			while (more) {
				struct xen_netif_extra_info extra;

				if (at == prod)
					return 0;
				*why = "an RX packet with too many extra infos";
				if (++extras > RFN_EXTRAS_MAX)
					return -EPROTO;
				extra = READ_ONCE(*rfn_rx_extra_info(q, at));
				at++;
				rfn_rx_extra(chain, &extra);
				more = extra.flags & XEN_NETIF_EXTRA_FLAG_MORE;
			}
		}
		if (!(response.flags & XEN_NETRXF_more_data))
			break;
		*why = "an RX packet with too many slots";
		if (chain->pieces == RFN_RX_SLOTS_MAX)
			return -EPROTO;
	}
	chain->slots = at - first;
	return chain->slots;
}

/* Position in the bytes of a chain. */
struct rfn_cursor {
	unsigned int piece;
	unsigned int offset;
};

/* Copies the next `len` bytes of the chain. The caller keeps to the chain's length. */
static void rfn_rx_copy(struct rfn_queue *q, const struct rfn_chain *chain, struct rfn_cursor *from,
			void *to, unsigned int len)
{
	while (len && from->piece < chain->pieces) {
		const struct rfn_piece *piece = &chain->piece[from->piece];
		unsigned int n = min(len, piece->len - from->offset);

		memcpy(to, q->rx_page[piece->slot].va + piece->offset + from->offset, n);
		to += n;
		len -= n;
		from->offset += n;
		if (from->offset == piece->len) {
			from->piece++;
			from->offset = 0;
		}
	}
}

/* Copies the packet into private memory. */
static struct sk_buff *rfn_rx_build(struct rfn_queue *q, const struct rfn_chain *chain)
{
	unsigned int head = chain->bytes <= RFN_RX_LINEAR_MAX ? chain->bytes : RFN_RX_HEADER;
	unsigned int left = chain->bytes - head;
	struct rfn_cursor from = {};
	struct sk_buff *skb;
	int i;

	skb = napi_alloc_skb(&q->napi, head);
	if (!skb)
		return NULL;
	rfn_rx_copy(q, chain, &from, skb_put(skb, head), head);
	if (left)
		skb_mark_for_recycle(skb);
	for (i = 0; left; i++) {
		unsigned int n = min_t(unsigned int, left, PAGE_SIZE);
		struct page *page = page_pool_dev_alloc_pages(q->pool);

		if (!page) {
			kfree_skb(skb);
			return NULL;
		}
		rfn_rx_copy(q, chain, &from, page_address(page), n);
		skb_add_rx_frag(skb, i, page, 0, n, PAGE_SIZE);
		left -= n;
	}
	return skb;
}

/*
 * Sets checksum state and segmentation. Returns false if the headers do not allow what the backend
 * says.
 */
static bool rfn_rx_offloads(struct rfn_queue *q, struct sk_buff *skb, const struct rfn_chain *chain)
{
	bool blank = chain->flags & XEN_NETRXF_csum_blank;

	if (chain->gso_size) {
		skb_shinfo(skb)->gso_size = chain->gso_size;
		skb_shinfo(skb)->gso_type =
			chain->gso_type == XEN_NETIF_GSO_TYPE_TCPV4 ? SKB_GSO_TCPV4 : SKB_GSO_TCPV6;
		/* The stack validates the headers and counts the segments. */
		skb_shinfo(skb)->gso_type |= SKB_GSO_DODGY;
		skb_shinfo(skb)->gso_segs = 0;
	}
	if (!blank && !chain->gso_size) {
		if (chain->flags & XEN_NETRXF_data_validated &&
		    q->rd->ndev->features & NETIF_F_RXCSUM)
			skb->ip_summed = CHECKSUM_UNNECESSARY;
		return true;
	}
	skb_reset_network_header(skb);
	skb->ip_summed = CHECKSUM_PARTIAL;
	/*
	 * A packet to be segmented needs the pseudo header's sum, whatever the backend left in the
	 * field.
	 */
	return !skb_checksum_setup(skb, !blank);
}

static enum pkt_hash_types rfn_rx_hash_type(const struct rfn_chain *chain)
{
	switch (chain->hash_type) {
	case _XEN_NETIF_CTRL_HASH_TYPE_IPV4_TCP:
	case _XEN_NETIF_CTRL_HASH_TYPE_IPV6_TCP:
		return PKT_HASH_TYPE_L4;
	default:
		return PKT_HASH_TYPE_L3;
	}
}

static void rfn_rx_deliver(struct rfn_queue *q, const struct rfn_chain *chain)
{
	struct rfn_stats *stats = &q->rx_stats;
	struct sk_buff *skb = NULL;
	bool starved = false;

	if (!chain->failed && chain->bytes >= ETH_HLEN && chain->bytes <= RFN_RX_BYTES_MAX) {
		skb = rfn_rx_build(q, chain);
		starved = !skb;
	}
	if (skb) {
		skb->protocol = eth_type_trans(skb, q->rd->ndev);
		if (!rfn_rx_offloads(q, skb, chain)) {
			kfree_skb(skb);
			skb = NULL;
		}
	}
	u64_stats_update_begin(&stats->sync);
	stats->slots += chain->slots;
	if (skb) {
		stats->packets++;
		stats->bytes += chain->bytes;
		stats->gso += !!chain->gso_size;
	} else if (starved) {
		stats->starved++;
		stats->dropped++;
	} else {
		stats->errors++;
	}
	u64_stats_update_end(&stats->sync);
	if (!skb)
		return;
	if (chain->hashed)
		skb_set_hash(skb, chain->hash, rfn_rx_hash_type(chain));
	skb_record_rx_queue(skb, q->index);
	napi_gro_receive(&q->napi, skb);
}

/*
 * Delivers up to `budget` packets and posts their pages again. NAPI only. Returns the number of
 * packets.
 */
int rfn_rx_poll(struct rfn_queue *q, int budget)
{
	u32 prod = READ_ONCE(q->rx.sring->rsp_prod);
	struct rfn_chain chain;
	int done = 0;

	if (test_bit(RFN_Q_BROKEN, &q->flags))
		return 0;
	/* Reads entries after the producer index. */
	virt_rmb();
	if (unlikely(prod - q->rx.rsp_cons > q->rx.req_prod_pvt - q->rx.rsp_cons)) {
		set_bit(RFN_Q_BROKEN, &q->flags);
		rfn_fault(q->rd, q->index, "the RX response index is beyond the requests");
		return 0;
	}
	while (done < budget && q->rx.rsp_cons != prod) {
		const char *why = NULL;
		int slots = rfn_rx_chain(q, prod, &chain, &why);

		if (unlikely(slots < 0)) {
			set_bit(RFN_Q_BROKEN, &q->flags);
			rfn_fault(q->rd, q->index, why);
			return done;
		}
		if (!slots)
			break;
		rfn_rx_deliver(q, &chain);
		q->rx.rsp_cons += slots;
		done++;
		/* Keeps three quarters of the ring posted during a long poll. */
		if (q->rx.req_prod_pvt - q->rx.rsp_cons < RFN_RING * 3 / 4) {
			rfn_rx_post(q);
			rfn_rx_publish(q);
		}
	}
	if (q->rx.req_prod_pvt - q->rx.rsp_cons != RFN_RING) {
		rfn_rx_post(q);
		rfn_rx_publish(q);
	}
	return done;
}

/*
 * Asks for an event for the next response. Returns true if there is a new one. Responses that begin
 * an incomplete chain are not new: the event asked for is that of the next one.
 */
bool rfn_rx_final_check(struct rfn_queue *q)
{
	u32 seen = READ_ONCE(q->rx.sring->rsp_prod);

	if (seen != q->rx.rsp_cons) {
		/* NAPI ended with responses left: they are new, or the chain is incomplete. */
		struct rfn_chain chain;
		const char *why;

		if (seen - q->rx.rsp_cons > RFN_RING || rfn_rx_chain(q, seen, &chain, &why))
			return true;
	}
	q->rx.sring->rsp_event = seen + 1;
	/* Publishes the index of the event before it reads the producer index again. */
	virt_mb();
	return READ_ONCE(q->rx.sring->rsp_prod) != seen;
}
