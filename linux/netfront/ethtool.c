// SPDX-License-Identifier: GPL-2.0-only
/* ethtool: driver information, rings, channels, counters, and receive-side scaling. */
#include <linux/ethtool.h>
#include <linux/rtnetlink.h>
#include "netfront.h"
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)
#include <net/netdev_queues.h>
#endif

static const char *const rfn_event_names[RFN_EVENTS] = {
	[RFN_EV_CONNECTS] = "connects",
	[RFN_EV_FAULTS] = "backend_faults",
	[RFN_EV_CTRL_TIMEOUTS] = "ctrl_timeouts",
	[RFN_EV_STAGING_REFUSED] = "staging_refused",
	[RFN_EV_SHRUNK_PAGES] = "shrunk_pages",
	[RFN_EV_MCAST_REFUSED] = "multicast_refused",
	[RFN_EV_ISSUES] = "window_issues",
	[RFN_EV_REVOKES] = "window_revokes",
	[RFN_EV_FORCED] = "window_forced_revokes",
	[RFN_EV_WINDOWS_REFUSED] = "windows_refused",
	[RFN_EV_LOST_PAGES] = "window_lost_pages",
};

/*
 * Gauges of the device: staged pages, issued ones, and groups of the backend's filter while it is
 * on.
 */
#define RFN_GAUGES 3

/* Counters that both directions of a queue have. */
static const struct {
	const char *name;
	size_t offset;
} rfn_queue_counters[] = {
	{ "packets", offsetof(struct rfn_stats, packets) },
	{ "bytes", offsetof(struct rfn_stats, bytes) },
	{ "slots", offsetof(struct rfn_stats, slots) },
	{ "gso", offsetof(struct rfn_stats, gso) },
	{ "dropped", offsetof(struct rfn_stats, dropped) },
};

/* Counters that one direction alone has: four of TX, two of RX. */
#define RFN_OTHER_COUNTERS 6

static void rfn_get_drvinfo(struct net_device *ndev, struct ethtool_drvinfo *info)
{
	strscpy(info->driver, RFN_NAME, sizeof(info->driver));
	strscpy(info->bus_info, dev_name(ndev->dev.parent), sizeof(info->bus_info));
}

static void rfn_get_ringparam(struct net_device *ndev, struct ethtool_ringparam *ring,
			      struct kernel_ethtool_ringparam *kernel,
			      struct netlink_ext_ack *extack)
{
	ring->rx_max_pending = RFN_RING;
	ring->tx_max_pending = RFN_RING;
	ring->rx_pending = RFN_RING;
	ring->tx_pending = RFN_RING;
}

static void rfn_get_channels(struct net_device *ndev, struct ethtool_channels *channels)
{
	const struct rfn_dev *rd = netdev_priv(ndev);

	channels->max_combined = max_t(unsigned int, rd->peer.queues, 1);
	channels->combined_count = ndev->real_num_rx_queues;
}

/*
 * Connects anew with another number of queues, which the interface has from now on. The link is
 * down until it is connected, and nothing is sent by the queues of before.
 */
static int rfn_set_channels(struct net_device *ndev, struct ethtool_channels *channels)
{
	unsigned int count = channels->combined_count;
	struct rfn_dev *rd = netdev_priv(ndev);
	int err;

	if (!count || count > rd->peer.queues)
		return -EINVAL;
	if (count == ndev->real_num_rx_queues)
		return 0;
	rfn_stop_sending(rd);
	err = netif_set_real_num_queues(ndev, count, count);
	if (err)
		return err;
	rd->queues_wanted = count;
	rfn_hash_fill_table(rd, count);
	if (rd->connected)
		schedule_work(&rd->restart_work);
	return 0;
}

static int rfn_get_sset_count(struct net_device *ndev, int set)
{
	const struct rfn_dev *rd = netdev_priv(ndev);

	if (set != ETH_SS_STATS)
		return -EOPNOTSUPP;
	return RFN_GAUGES + RFN_EVENTS +
	       rd->queues * (2 * ARRAY_SIZE(rfn_queue_counters) + RFN_OTHER_COUNTERS);
}

static void rfn_get_strings(struct net_device *ndev, u32 set, u8 *data)
{
	const struct rfn_dev *rd = netdev_priv(ndev);
	unsigned int i, k;

	if (set != ETH_SS_STATS)
		return;
	ethtool_sprintf(&data, "staged_pages");
	ethtool_sprintf(&data, "issued_pages");
	ethtool_sprintf(&data, "multicast_groups");
	for (i = 0; i < RFN_EVENTS; i++)
		ethtool_sprintf(&data, "%s", rfn_event_names[i]);
	for (i = 0; i < rd->queues; i++) {
		for (k = 0; k < ARRAY_SIZE(rfn_queue_counters); k++)
			ethtool_sprintf(&data, "tx%u_%s", i, rfn_queue_counters[k].name);
		ethtool_sprintf(&data, "tx%u_staged_slots", i);
		ethtool_sprintf(&data, "tx%u_window_slots", i);
		ethtool_sprintf(&data, "tx%u_stops", i);
		ethtool_sprintf(&data, "tx%u_refused", i);
		for (k = 0; k < ARRAY_SIZE(rfn_queue_counters); k++)
			ethtool_sprintf(&data, "rx%u_%s", i, rfn_queue_counters[k].name);
		ethtool_sprintf(&data, "rx%u_errors", i);
		ethtool_sprintf(&data, "rx%u_no_memory", i);
	}
}

/* Copies the counters of one queue and direction, each consistent with the others. */
static void rfn_snapshot(const struct rfn_stats *from, struct rfn_stats *to)
{
	unsigned int start;

	do {
		start = u64_stats_fetch_begin(&from->sync);
		*to = *from;
	} while (u64_stats_fetch_retry(&from->sync, start));
}

static u64 *rfn_put_counters(u64 *data, const struct rfn_stats *stats)
{
	unsigned int k;

	for (k = 0; k < ARRAY_SIZE(rfn_queue_counters); k++)
		*data++ = *(const u64 *)((const char *)stats + rfn_queue_counters[k].offset);
	return data;
}

static void rfn_get_ethtool_stats(struct net_device *ndev, struct ethtool_stats *stats, u64 *data)
{
	struct rfn_dev *rd = netdev_priv(ndev);
	struct rfn_stats tx, rx;
	unsigned int i;

	*data++ = atomic_read(&rd->staged);
	*data++ = atomic_read(&rd->issued);
	*data++ = rd->mcast.on ? rd->mcast.groups : 0;
	for (i = 0; i < RFN_EVENTS; i++)
		*data++ = atomic64_read(&rd->event[i]);
	for (i = 0; i < rd->queues; i++) {
		rfn_snapshot(&rd->queue[i]->tx_stats, &tx);
		rfn_snapshot(&rd->queue[i]->rx_stats, &rx);
		data = rfn_put_counters(data, &tx);
		*data++ = tx.staged;
		*data++ = tx.issued;
		*data++ = tx.starved;
		*data++ = rx.tx_refused;
		data = rfn_put_counters(data, &rx);
		*data++ = rx.errors;
		*data++ = rx.starved;
	}
}

/* Adds the counters of a queue to those of the interface. */
void rfn_queue_stats(const struct rfn_queue *q, struct rtnl_link_stats64 *sum)
{
	struct rfn_stats tx, rx;

	rfn_snapshot(&q->tx_stats, &tx);
	rfn_snapshot(&q->rx_stats, &rx);
	sum->tx_packets += tx.packets;
	sum->tx_bytes += tx.bytes;
	sum->tx_dropped += tx.dropped;
	sum->tx_errors += rx.tx_refused;
	sum->rx_packets += rx.packets;
	sum->rx_bytes += rx.bytes;
	sum->rx_dropped += rx.dropped;
	sum->rx_errors += rx.errors;
}

/*
 * Adds the counters of the queue with this index, and of those that had it in earlier connections.
 * Called with stats_lock held.
 */
void rfn_index_stats(const struct rfn_dev *rd, unsigned int index, struct rtnl_link_stats64 *sum)
{
	const struct rtnl_link_stats64 *before = &rd->stats_before[index];

	sum->tx_packets += before->tx_packets;
	sum->tx_bytes += before->tx_bytes;
	sum->tx_dropped += before->tx_dropped;
	sum->tx_errors += before->tx_errors;
	sum->rx_packets += before->rx_packets;
	sum->rx_bytes += before->rx_bytes;
	sum->rx_dropped += before->rx_dropped;
	sum->rx_errors += before->rx_errors;
	if (index < rd->queues)
		rfn_queue_stats(rd->queue[index], sum);
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0)
static void rfn_sum_of_indices(struct rfn_dev *rd, unsigned int from, unsigned int to,
			       struct rtnl_link_stats64 *sum)
{
	unsigned int i;

	memset(sum, 0, sizeof(*sum));
	spin_lock_bh(&rd->stats_lock);
	for (i = from; i < to; i++)
		rfn_index_stats(rd, i, sum);
	spin_unlock_bh(&rd->stats_lock);
}

static void rfn_get_queue_stats_rx(struct net_device *ndev, int index,
				   struct netdev_queue_stats_rx *stats)
{
	struct rtnl_link_stats64 sum;

	rfn_sum_of_indices(netdev_priv(ndev), index, index + 1, &sum);
	stats->packets = sum.rx_packets;
	stats->bytes = sum.rx_bytes;
}

static void rfn_get_queue_stats_tx(struct net_device *ndev, int index,
				   struct netdev_queue_stats_tx *stats)
{
	struct rtnl_link_stats64 sum;

	rfn_sum_of_indices(netdev_priv(ndev), index, index + 1, &sum);
	stats->packets = sum.tx_packets;
	stats->bytes = sum.tx_bytes;
}

/* Reads the counters of queues that the interface had and has no longer. */
static void rfn_get_base_stats(struct net_device *ndev, struct netdev_queue_stats_rx *rx,
			       struct netdev_queue_stats_tx *tx)
{
	struct rtnl_link_stats64 sum;

	rfn_sum_of_indices(netdev_priv(ndev), ndev->real_num_rx_queues, RFN_QUEUES_MAX, &sum);
	rx->packets = sum.rx_packets;
	rx->bytes = sum.rx_bytes;
	tx->packets = sum.tx_packets;
	tx->bytes = sum.tx_bytes;
}

static const struct netdev_stat_ops rfn_stat_ops = {
	.get_queue_stats_rx = rfn_get_queue_stats_rx,
	.get_queue_stats_tx = rfn_get_queue_stats_tx,
	.get_base_stats = rfn_get_base_stats,
};

/* Lets the kernel report counters of each queue by netlink. */
void rfn_set_stat_ops(struct net_device *ndev)
{
	ndev->stat_ops = &rfn_stat_ops;
}
#else
void rfn_set_stat_ops(struct net_device *ndev)
{
}
#endif

static u32 rfn_get_rxfh_key_size(struct net_device *ndev)
{
	return RFN_HASH_KEY;
}

static u32 rfn_get_rxfh_indir_size(struct net_device *ndev)
{
	return RFN_HASH_TABLE;
}

static int rfn_rxfh_get(struct rfn_dev *rd, u32 *indir, u8 *key)
{
	if (!rd->peer.ctrl)
		return -EOPNOTSUPP;
	rfn_hash_fill_key(rd);
	if (indir)
		memcpy(indir, rd->hash.table, sizeof(rd->hash.table));
	if (key)
		memcpy(key, rd->hash.key, sizeof(rd->hash.key));
	return 0;
}

static int rfn_rxfh_set(struct rfn_dev *rd, const u32 *indir, const u8 *key, u8 hfunc)
{
	int err;

	if (!rd->peer.ctrl || (hfunc != ETH_RSS_HASH_NO_CHANGE && hfunc != ETH_RSS_HASH_TOP))
		return -EOPNOTSUPP;
	rfn_hash_fill_key(rd);
	if (indir)
		memcpy(rd->hash.table, indir, sizeof(rd->hash.table));
	if (key)
		memcpy(rd->hash.key, key, sizeof(rd->hash.key));
	rd->hash.configured = true;
	/* The next connection begins with it, if this one is not there yet or ends. */
	err = READ_ONCE(rd->peer_connected) ? rfn_hash_apply(rd) : 0;
	return err == -ENODEV ? 0 : err;
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 8, 0)
static int rfn_get_rxfh(struct net_device *ndev, struct ethtool_rxfh_param *param)
{
	param->hfunc = ETH_RSS_HASH_TOP;
	return rfn_rxfh_get(netdev_priv(ndev), param->indir, param->key);
}

static int rfn_set_rxfh(struct net_device *ndev, struct ethtool_rxfh_param *param,
			struct netlink_ext_ack *extack)
{
	return rfn_rxfh_set(netdev_priv(ndev), param->indir, param->key, param->hfunc);
}
#else
static int rfn_get_rxfh(struct net_device *ndev, u32 *indir, u8 *key, u8 *hfunc)
{
	if (hfunc)
		*hfunc = ETH_RSS_HASH_TOP;
	return rfn_rxfh_get(netdev_priv(ndev), indir, key);
}

static int rfn_set_rxfh(struct net_device *ndev, const u32 *indir, const u8 *key, const u8 hfunc)
{
	return rfn_rxfh_set(netdev_priv(ndev), indir, key, hfunc);
}
#endif

/* `ethtool -x` asks for the number of rings first. */
static int rfn_get_rxnfc(struct net_device *ndev, struct ethtool_rxnfc *info, u32 *rules)
{
	if (info->cmd != ETHTOOL_GRXRINGS)
		return -EOPNOTSUPP;
	info->data = ndev->real_num_rx_queues;
	return 0;
}

const struct ethtool_ops rfn_ethtool_ops = {
	.get_drvinfo = rfn_get_drvinfo,
	.get_link = ethtool_op_get_link,
	.get_ts_info = ethtool_op_get_ts_info,
	.get_ringparam = rfn_get_ringparam,
	.get_channels = rfn_get_channels,
	.set_channels = rfn_set_channels,
	.get_sset_count = rfn_get_sset_count,
	.get_strings = rfn_get_strings,
	.get_ethtool_stats = rfn_get_ethtool_stats,
	.get_rxnfc = rfn_get_rxnfc,
	.get_rxfh_key_size = rfn_get_rxfh_key_size,
	.get_rxfh_indir_size = rfn_get_rxfh_indir_size,
	.get_rxfh = rfn_get_rxfh,
	.set_rxfh = rfn_set_rxfh,
};
