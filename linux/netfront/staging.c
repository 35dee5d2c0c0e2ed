// SPDX-License-Identifier: GPL-2.0-only
/*
 * Staging grants: registers the pages of every queue at the backend, which then reaches them
 * without grant operations.
 *
 * RX pages come first, then TX pages (in header-only form: the pages of headers), in lists of
 * `staging_batch` entries, up to the size that the backend answers for the queue. What is refused
 * or beyond that size is used all the same: the backend copies or maps such a page each time. Under
 * memory pressure a shrinker takes free TX pages out of the staging table, or revokes those of a
 * grant window, and frees them.
 */
#include "netfront.h"
#include <linux/shrinker.h>

static LIST_HEAD(rfn_devices);
static DEFINE_SPINLOCK(rfn_devices_lock);

/* Sends the pages in one list. Called with ctrl.lock held. */
static int rfn_stage_list(struct rfn_dev *rd, u16 type, unsigned int queue,
			  struct rfn_page *const *pages, unsigned int count, bool readonly)
{
	struct rfn_gref *list = rd->ctrl.list.va;
	unsigned int i;

	if (!rd->ctrl.usable)
		return -ENODEV;
	for (i = 0; i < count; i++)
		list[i] = (struct rfn_gref){ .ref = pages[i]->ref,
					     .flags = readonly ? RFN_GREF_READONLY : 0 };
	return rfn_ctrl_message(rd, type, queue, rd->ctrl.list.ref, count, NULL);
}

/* Adds pages of one kind, batch by batch. Returns the number added. */
static unsigned int rfn_stage_pages(struct rfn_queue *q, struct rfn_page *pages, unsigned int count,
				    bool readonly)
{
	unsigned int batch = clamp_t(unsigned int, READ_ONCE(rfn_staging_batch), 1, RFN_LIST_MAX);
	unsigned int done = 0, n, i;
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

/*
 * Stages what the backend takes, in a connection that is Connected on both sides and has no
 * windows, and logs which access the backend has to the pages. Called with rfn_dev.lock held.
 */
void rfn_stage_all(struct rfn_dev *rd)
{
	const char *why = !READ_ONCE(rfn_staging) ? "they are switched off" :
						    "the backend has no control ring";
	unsigned int i, rx = 0, tx = 0;

	if (!READ_ONCE(rfn_staging) || !rd->ctrl.usable)
		goto report;
	why = "the backend refuses them";
	mutex_lock(&rd->ctrl.lock);
	for (i = 0; i < rd->queues; i++) {
		struct rfn_queue *q = rd->queue[i];
		u32 most = 0;

		if (rfn_ctrl_message(rd, RFN_CTRL_GET_GREF_MAPPING_SIZE, i, 0, 0, &most) || !most)
			break;
		rx += rfn_stage_pages(q, q->rx_page, min_t(u32, most, RFN_RING), false);
		if (q->heads && most >= RFN_RING + RFN_HEAD_PAGES) {
			unsigned int heads = rfn_stage_pages(q, q->head_page, RFN_HEAD_PAGES, true);

			/* Publishes the pages' state to senders. */
			smp_store_release(&q->heads_staged, heads == RFN_HEAD_PAGES);
			tx += heads;
		} else if (!q->heads && most > RFN_RING) {
			tx += rfn_stage_pages(q, q->tx_page, min_t(u32, most - RFN_RING, RFN_RING),
					      true);
		}
	}
	mutex_unlock(&rd->ctrl.lock);
report:
	if (rx + tx)
		netdev_info(rd->ndev,
			    "%u pages are staged, %u of them for sending (no grant windows: %s)\n",
			    rx + tx, tx, rd->no_windows);
	else
		netdev_info(rd->ndev,
			    "the backend copies or maps pages (no grant windows: %s; no staged pages: %s)\n",
			    rd->no_windows, why);
	/* Pages of headers are few, and in use all the time. */
	atomic_set(&rd->tx_spare, max_t(int, 0, (int)tx - (int)(rd->queues * RFN_TX_KEPT)));
}

/*
 * Takes up to one list of pages out of the queue's table. Returns the number of pages, or an error.
 */
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

/*
 * Takes every page out of the staging tables, before the device closes. Called with rfn_dev.lock
 * held.
 */
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

/*
 * Takes pages out of the queue's staging table. The backend may still map those for which this
 * fails.
 */
static void rfn_unstage_some(struct rfn_queue *q, const u16 *ids, unsigned int count)
{
	struct rfn_page *list[RFN_LIST_MAX];
	unsigned int i;
	int err;

	for (i = 0; i < count; i++)
		list[i] = &q->tx_page[ids[i]];
	mutex_lock(&q->rd->ctrl.lock);
	err = rfn_stage_list(q->rd, RFN_CTRL_DEL_GREF_MAPPING, q->index, list, count, false);
	mutex_unlock(&q->rd->ctrl.lock);
	if (err)
		netdev_dbg(q->rd->ndev, "DEL of %u pages failed (%d)\n", count, err);
	atomic_sub(count, &q->rd->staged);
}

/*
 * Takes free TX pages of one queue out of its staging table, or revokes them, and frees them.
 * Returns the number of pages.
 */
static unsigned int rfn_shrink_queue(struct rfn_queue *q, unsigned int most)
{
	struct netdev_queue *txq = netdev_get_tx_queue(q->rd->ndev, q->index);
	unsigned int n, i, freed = 0;
	u16 ids[RFN_LIST_MAX];

	__netif_tx_lock_bh(txq);
	n = rfn_tx_withdraw(q, ids, min_t(unsigned int, most, RFN_LIST_MAX));
	__netif_tx_unlock_bh(txq);
	if (!n)
		return 0;
	if (q->windows)
		rfn_window_revoke(&q->tx_window, ids, n);
	else
		rfn_unstage_some(q, ids, n);
	for (i = 0; i < n; i++) {
		/* A page that could not be revoked is freed with the window. */
		if (q->tx_page[ids[i]].issued)
			continue;
		/* A granted page that the backend still maps is freed when it no longer does. */
		rfn_page_free(q->rd, &q->tx_page[ids[i]]);
		freed++;
	}
	return freed;
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
