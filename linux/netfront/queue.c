// SPDX-License-Identifier: GPL-2.0-only
/*
 * One queue: a TX ring, an RX ring, their pages and event channels, and one NAPI instance for both
 * rings.
 *
 * Each ring has an event channel if the backend takes two. xen-netback needs two: with one it
 * installs the handler before it has stored the interrupt's number, and a backend thread that runs
 * in between leaves the channel masked for good.
 *
 * The event channels are bound with late EOI. They stay masked from their interrupt until NAPI has
 * finished, and an event without work is reported as spurious, so that the kernel delays the next
 * one. A backend that sends events without end therefore costs one poll at a time.
 */
#include <linux/interrupt.h>
#include "netfront.h"
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 6, 0)
#include <net/page_pool/helpers.h>
#else
#include <net/page_pool.h>
#endif

static irqreturn_t rfn_interrupt(int irq, void *data)
{
	struct rfn_channel *channel = data;

	WRITE_ONCE(channel->masked, true);
	napi_schedule(&channel->q->napi);
	return IRQ_HANDLED;
}

/*
 * Ends the masking of the interrupts. Work that polls found counts for the events of both channels.
 */
static void rfn_queue_unmask(struct rfn_queue *q)
{
	unsigned int eoi_flags = q->worked ? 0 : XEN_EOI_FLAG_SPURIOUS;
	unsigned int i;

	for (i = 0; i < q->channels; i++) {
		if (!READ_ONCE(q->channel[i].masked))
			continue;
		WRITE_ONCE(q->channel[i].masked, false);
		xen_irq_lateeoi(q->channel[i].irq, eoi_flags);
		q->worked = false;
	}
}

static int rfn_poll(struct napi_struct *napi, int budget)
{
	struct rfn_queue *q = container_of(napi, struct rfn_queue, napi);
	u32 tx_before = q->tx.rsp_cons, rx_before = q->rx.rsp_cons;
	int done = 0;
	bool more;

	rfn_tx_complete(q, budget);
	if (budget)
		done = rfn_rx_poll(q, budget);
	if (test_bit(RFN_Q_BROKEN, &q->flags)) {
		/* The interrupts stay masked. rfn_disconnect() follows. */
		napi_complete_done(napi, 0);
		return 0;
	}
	if (q->tx.rsp_cons != tx_before || q->rx.rsp_cons != rx_before)
		q->worked = true;
	if (done >= budget)
		return done;
	more = rfn_tx_final_check(q);
	more |= rfn_rx_final_check(q);
	if (more)
		return budget;
	/*
	 * All of this is before NAPI ends: the interrupt of a channel that is not masked may start
	 * a poll then.
	 */
	rfn_queue_unmask(q);
	napi_complete_done(napi, done);
	return done;
}

static int rfn_queue_windows(struct rfn_queue *q)
{
	int err, i;

	err = rfn_window_create(&q->tx_window, q->rd, q->tx_page, true);
	if (!err)
		err = rfn_window_create(&q->rx_window, q->rd, q->rx_page, false);
	for (i = 0; !err && i < RFN_RING; i++) {
		err = rfn_page_alloc_for_window(&q->tx_page[i], i);
		if (!err)
			err = rfn_page_alloc_for_window(&q->rx_page[i], i);
	}
	return err;
}

static int rfn_queue_pages(struct rfn_queue *q)
{
	domid_t peer = q->rd->xdev->otherend_id;
	int err, i;

	err = rfn_page_alloc(&q->tx_ring, peer, false);
	if (!err)
		err = rfn_page_alloc(&q->rx_ring, peer, false);
	if (!err && q->windows)
		return rfn_queue_windows(q);
	for (i = 0; !err && i < RFN_RING; i++) {
		err = rfn_page_alloc(&q->tx_page[i], peer, true);
		if (!err)
			err = rfn_page_alloc(&q->rx_page[i], peer, false);
	}
	for (i = 0; !err && q->heads && i < RFN_HEAD_PAGES; i++)
		err = rfn_page_alloc(&q->head_page[i], peer, true);
	return err;
}

static int rfn_channel_open(struct rfn_queue *q, const char *ring)
{
	struct rfn_channel *channel = &q->channel[q->channels];
	struct rfn_dev *rd = q->rd;
	int err;

	err = xenbus_alloc_evtchn(rd->xdev, &channel->port);
	if (err)
		return err;
	channel->q = q;
	snprintf(channel->name, sizeof(channel->name), "%s-%u%s", rd->ndev->name, q->index, ring);
	err = bind_evtchn_to_irqhandler_lateeoi(channel->port, rfn_interrupt, 0, channel->name,
						channel);
	if (err < 0) {
		xenbus_free_evtchn(rd->xdev, channel->port);
		return err;
	}
	channel->irq = err;
	q->channels++;
	return 0;
}

static int rfn_queue_channels(struct rfn_queue *q)
{
	int err;

	if (!q->rd->peer.split)
		return rfn_channel_open(q, "");
	err = rfn_channel_open(q, "-tx");
	return err ? err : rfn_channel_open(q, "-rx");
}

/*
 * Creates a queue with all pages granted, its RX ring full of buffers unless they have to wait, and
 * NAPI disabled. Pages of windows are issued by rfn_windows_issue(). Called under RTNL.
 */
struct rfn_queue *rfn_queue_create(struct rfn_dev *rd, unsigned int index)
{
	struct page_pool_params pool = {
		.pool_size = RFN_RING,
		.nid = NUMA_NO_NODE,
		.dev = &rd->xdev->dev,
	};
	struct rfn_queue *q;
	int err;

	q = kvzalloc(sizeof(*q), GFP_KERNEL);
	if (!q)
		return ERR_PTR(-ENOMEM);
	q->rd = rd;
	q->index = index;
	q->windows = rd->windows;
	q->posting = !q->windows && !rd->hash.configured;
	q->heads = !q->windows && READ_ONCE(rfn_staging) && READ_ONCE(rfn_staging_header);
	u64_stats_init(&q->tx_stats.sync);
	u64_stats_init(&q->rx_stats.sync);
	netif_napi_add(rd->ndev, &q->napi, rfn_poll);
	err = rfn_queue_pages(q);
	if (err)
		goto fail;
	q->pool = page_pool_create(&pool);
	if (IS_ERR(q->pool)) {
		err = PTR_ERR(q->pool);
		q->pool = NULL;
		goto fail;
	}
	rfn_tx_init(q);
	rfn_rx_init(q);
	err = rfn_queue_channels(q);
	if (err)
		goto fail;
	return q;
fail:
	rfn_queue_destroy(q);
	return ERR_PTR(err);
}

/* Frees a queue whose NAPI is disabled and whose packets are no longer sent. Called under RTNL. */
void rfn_queue_destroy(struct rfn_queue *q)
{
	int i;

	while (q->channels) {
		q->channels--;
		unbind_from_irqhandler(q->channel[q->channels].irq, &q->channel[q->channels]);
	}
	netif_napi_del(&q->napi);
	rfn_tx_drop_all(q);
	rfn_window_close(&q->tx_window);
	rfn_window_close(&q->rx_window);
	for (i = 0; i < RFN_RING; i++) {
		rfn_page_free(q->rd, &q->tx_page[i]);
		rfn_page_free(q->rd, &q->rx_page[i]);
	}
	for (i = 0; i < RFN_HEAD_PAGES; i++)
		rfn_page_free(q->rd, &q->head_page[i]);
	rfn_page_free(q->rd, &q->tx_ring);
	rfn_page_free(q->rd, &q->rx_ring);
	if (q->pool)
		page_pool_destroy(q->pool);
	kvfree(q);
}

/* Starts NAPI. The first poll unmasks interrupts that came before. */
void rfn_queue_enable(struct rfn_queue *q)
{
	napi_enable(&q->napi);
	local_bh_disable();
	napi_schedule(&q->napi);
	local_bh_enable();
}

void rfn_queue_disable(struct rfn_queue *q)
{
	napi_disable(&q->napi);
}

/* Lets RX pages be posted. A poll posts them, and wakes senders. */
void rfn_queue_post(struct rfn_queue *q)
{
	if (q->posting)
		return;
	/* Pairs with rfn_rx_post(). */
	smp_store_release(&q->posting, true);
	local_bh_disable();
	napi_schedule(&q->napi);
	local_bh_enable();
}
