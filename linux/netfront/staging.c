// SPDX-License-Identifier: GPL-2.0-only
/*
 * Staging grants: registers the pages of every queue at the backend, which then reaches them without grant operations.
 *
 * RX pages come first, then TX pages (in header-only form: the pages of headers), in lists of `staging_batch` entries, up to the size that the backend answers for
 * the queue. What is refused or beyond that size is used all the same: the backend copies or maps such a page each
 * time. Under memory pressure a shrinker takes free TX pages out of the staging table and frees them.
 */
#include "netfront.h"
#include <linux/shrinker.h>

static LIST_HEAD(rfn_devices);
static DEFINE_SPINLOCK(rfn_devices_lock);

/* TX pages that stay with a queue whatever the shrinker wants. */
#define RFN_TX_KEPT (4 * RFN_TX_SLOTS_MAX)

/* Sends the pages in one list. Called with ctrl.lock held. */
static int rfn_stage_list(struct rfn_dev *rd, u16 type, unsigned int queue, struct rfn_page *const *pages,
			  unsigned int count, bool readonly)
{
	struct rfn_gref *list = rd->ctrl.list.va;
	unsigned int i;

	if (!rd->ctrl.usable)
		return -ENODEV;
	for (i = 0; i < count; i++)
		list[i] = (struct rfn_gref){ .ref = pages[i]->ref, .flags = readonly ? RFN_GREF_READONLY : 0 };
	return rfn_ctrl_message(rd, type, queue, rd->ctrl.list.ref, count, NULL);
}

/* Adds pages of one kind, batch by batch. Returns the number added. */
static unsigned int rfn_stage_pages(struct rfn_queue *q, struct rfn_page *pages, unsigned int count, bool readonly)
{
	unsigned int batch = clamp_t(unsigned int, READ_ONCE(rfn_staging_batch), 1, RFN_LIST_MAX), done = 0, n, i;
	struct rfn_page *list[RFN_LIST_MAX];
	struct rfn_dev *rd = q->rd;
	int err;

	while (done < count) {
		n = min(batch, count - done);
		for (i = 0; i < n; i++)
			list[i] = &pages[done + i];
		err = rfn_stage_list(rd, RFN_CTRL_ADD_GREF_MAPPING, q->index, list, n, readonly);
		if (err) {
			rfn_count(rd, RFN_EV_STAGING_REFUSED);
			break;
		}
		for (i = 0; i < n; i++)
			WRITE_ONCE(list[i]->staged, true);
		atomic_add(n, &rd->staged);
		done += n;
	}
	return done;
}

/* Stages what the backend takes. Called with rfn_dev.lock held, in a connection that is Connected on both sides. */
void rfn_stage_all(struct rfn_dev *rd)
{
	unsigned int i, rx = 0, tx = 0;

	if (!READ_ONCE(rfn_staging) || !rd->ctrl.usable)
		return;
	mutex_lock(&rd->ctrl.lock);
	for (i = 0; i < rd->queues; i++) {
		struct rfn_queue *q = rd->queue[i];
		u32 most = 0;
		int err;

		err = rfn_ctrl_message(rd, RFN_CTRL_GET_GREF_MAPPING_SIZE, i, 0, 0, &most);

		if (err || !most) {
			netdev_info(rd->ndev, "the backend stages no pages (%d); it copies or maps them\n", err);
			break;
		}
		rx += rfn_stage_pages(q, q->rx_page, min_t(u32, most, RFN_RING), false);
		if (q->heads && most >= RFN_RING + RFN_HEAD_PAGES) {
			unsigned int heads = rfn_stage_pages(q, q->head_page, RFN_HEAD_PAGES, true);

			/* Publishes the pages' state to senders. */
			smp_store_release(&q->heads_staged, heads == RFN_HEAD_PAGES);
			tx += heads;
		} else if (!q->heads && most > RFN_RING) {
			tx += rfn_stage_pages(q, q->tx_page, min_t(u32, most - RFN_RING, RFN_RING), true);
		}
	}
	mutex_unlock(&rd->ctrl.lock);
	if (rx + tx)
		netdev_info(rd->ndev, "%u pages are staged, %u of them for sending\n", rx + tx, tx);
	/* Pages of headers are few, and in use all the time. */
	atomic_set(&rd->tx_spare, max_t(int, 0, (int)tx - (int)(rd->queues * RFN_TX_KEPT)));
}

/* Takes up to one list of pages out of the queue's table. Returns the number of pages, or an error. */
static int rfn_unstage_pages(struct rfn_queue *q, struct rfn_page *pages, unsigned int count)
{
	struct rfn_page *list[RFN_LIST_MAX];
	unsigned int n = 0, i;
	int err;

	for (i = 0; i < count && n < RFN_LIST_MAX; i++)
		if (pages[i].staged)
			list[n++] = &pages[i];
	if (!n)
		return 0;
	err = rfn_stage_list(q->rd, RFN_CTRL_DEL_GREF_MAPPING, q->index, list, n, false);
	for (i = 0; i < n; i++)
		list[i]->staged = false;
	atomic_sub(n, &q->rd->staged);
	return err ?: n;
}

/* Takes every page out of the staging tables, before the device closes. Called with rfn_dev.lock held. */
void rfn_unstage_all(struct rfn_dev *rd)
{
	unsigned int i;
	int done = 0;

	atomic_set(&rd->tx_spare, 0);
	if (!atomic_read(&rd->staged))
		return;
	mutex_lock(&rd->ctrl.lock);
	for (i = 0; i < rd->queues && done >= 0; i++) {
		struct rfn_queue *q = rd->queue[i];

		WRITE_ONCE(q->heads_staged, false);
		do
			done = rfn_unstage_pages(q, q->rx_page, RFN_RING);
		while (done > 0);
		while (done >= 0 && (done = rfn_unstage_pages(q, q->tx_page, RFN_RING)) > 0)
			;
		if (done >= 0)
			done = rfn_unstage_pages(q, q->head_page, RFN_HEAD_PAGES);
	}
	mutex_unlock(&rd->ctrl.lock);
}

/* Takes free TX pages of one queue out of its staging table, and frees them. Returns the number of pages. */
static unsigned int rfn_shrink_queue(struct rfn_queue *q, unsigned int most)
{
	struct netdev_queue *txq = netdev_get_tx_queue(q->rd->ndev, q->index);
	struct rfn_page *list[RFN_LIST_MAX];
	unsigned int n, i;
	u16 ids[RFN_LIST_MAX];
	int err;

	__netif_tx_lock_bh(txq);
	n = rfn_tx_withdraw(q, ids, min_t(unsigned int, most, RFN_LIST_MAX));
	__netif_tx_unlock_bh(txq);
	if (!n)
		return 0;
	for (i = 0; i < n; i++)
		list[i] = &q->tx_page[ids[i]];
	mutex_lock(&q->rd->ctrl.lock);
	err = rfn_stage_list(q->rd, RFN_CTRL_DEL_GREF_MAPPING, q->index, list, n, false);
	mutex_unlock(&q->rd->ctrl.lock);
	if (err)
		netdev_dbg(q->rd->ndev, "DEL of %u pages failed (%d)\n", n, err);
	/* A page that the backend still maps is freed when it no longer does. */
	for (i = 0; i < n; i++)
		rfn_page_free(list[i]);
	atomic_sub(n, &q->rd->staged);
	return n;
}

void rfn_shrink_work(struct work_struct *work)
{
	struct rfn_dev *rd = container_of(work, struct rfn_dev, shrink_work);
	unsigned int wanted = atomic_xchg(&rd->shrink_wanted, 0), freed = 0, i;

	mutex_lock(&rd->lock);
	for (i = 0; rd->connected && rd->peer_connected && i < rd->queues && freed < wanted; i++)
		freed += rfn_shrink_queue(rd->queue[i], wanted - freed);
	atomic_set(&rd->tx_spare, max(0, atomic_read(&rd->tx_spare) - (int)freed));
	atomic64_add(freed, &rd->event[RFN_EV_SHRUNK_PAGES]);
	mutex_unlock(&rd->lock);
}

static unsigned long rfn_shrink_count(struct shrinker *shrinker, struct shrink_control *sc)
{
	unsigned long sum = 0;
	struct rfn_dev *rd;

	spin_lock(&rfn_devices_lock);
	list_for_each_entry(rd, &rfn_devices, link)
		sum += atomic_read(&rd->tx_spare);
	spin_unlock(&rfn_devices_lock);
	return sum ?: SHRINK_EMPTY;
}

/* Asks a work item for the pages: DEL waits for the backend, which reclaim must not. */
static unsigned long rfn_shrink_scan(struct shrinker *shrinker, struct shrink_control *sc)
{
	unsigned long left = sc->nr_to_scan;
	struct rfn_dev *rd;

	spin_lock(&rfn_devices_lock);
	list_for_each_entry(rd, &rfn_devices, link) {
		unsigned long n = min_t(unsigned long, left, atomic_read(&rd->tx_spare));

		if (n) {
			atomic_add(n, &rd->shrink_wanted);
			schedule_work(&rd->shrink_work);
			left -= n;
		}
	}
	spin_unlock(&rfn_devices_lock);
	return SHRINK_STOP;
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 7, 0)
static struct shrinker *rfn_shrinker;

int rfn_shrinker_register(void)
{
	rfn_shrinker = shrinker_alloc(0, RFN_NAME);
	if (!rfn_shrinker)
		return -ENOMEM;
	rfn_shrinker->count_objects = rfn_shrink_count;
	rfn_shrinker->scan_objects = rfn_shrink_scan;
	shrinker_register(rfn_shrinker);
	return 0;
}

void rfn_shrinker_unregister(void)
{
	shrinker_free(rfn_shrinker);
}
#else
static struct shrinker rfn_shrinker = {
	.count_objects = rfn_shrink_count,
	.scan_objects = rfn_shrink_scan,
	.seeks = DEFAULT_SEEKS,
};

int rfn_shrinker_register(void)
{
	return register_shrinker(&rfn_shrinker, RFN_NAME);
}

void rfn_shrinker_unregister(void)
{
	unregister_shrinker(&rfn_shrinker);
}
#endif

void rfn_shrinker_add(struct rfn_dev *rd)
{
	spin_lock(&rfn_devices_lock);
	list_add_tail(&rd->link, &rfn_devices);
	spin_unlock(&rfn_devices_lock);
}

void rfn_shrinker_del(struct rfn_dev *rd)
{
	spin_lock(&rfn_devices_lock);
	list_del(&rd->link);
	spin_unlock(&rfn_devices_lock);
}
