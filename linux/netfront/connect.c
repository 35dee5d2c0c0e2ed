// SPDX-License-Identifier: GPL-2.0-only
/*
 * Connection: reads the backend's features, creates the queues, publishes their keys, and tears all
 * of it down.
 *
 * A connection begins when the backend waits (InitWait) and ends when either side closes, the
 * backend breaks the protocol, or the guest is resumed. Every connection has new pages, grants and
 * event channels.
 */
#include <linux/rtnetlink.h>
#include "netfront.h"

/*
 * Keys at the top of the frontend's directory that describe one connection, ours or that of another
 * driver.
 */
static const char *const rfn_keys[] = {
	"tx-ring-ref",
	"rx-ring-ref",
	"event-channel",
	"event-channel-tx",
	"event-channel-rx",
	"ctrl-ring-ref",
	"event-channel-ctrl",
	"multi-queue-num-queues",
	"request-multicast-control",
	"xdp-headroom",
	"ringfence-tx-window",
	"ringfence-tx-window-references",
	"ringfence-rx-window",
	"ringfence-rx-window-references",
};

static void rfn_read_features(struct rfn_dev *rd)
{
	const char *backend = rd->xdev->otherend;

	rd->peer = (struct rfn_features){
		.sg = xenbus_read_unsigned(backend, "feature-sg", 0),
		.gso4 = xenbus_read_unsigned(backend, "feature-gso-tcpv4", 0),
		.gso6 = xenbus_read_unsigned(backend, "feature-gso-tcpv6", 0),
		.csum4 = !xenbus_read_unsigned(backend, "feature-no-csum-offload", 0),
		.csum6 = xenbus_read_unsigned(backend, "feature-ipv6-csum-offload", 0),
		.ctrl = xenbus_read_unsigned(backend, "feature-ctrl-ring", 0),
		.split = xenbus_read_unsigned(backend, "feature-split-event-channels", 0),
		.mcast = READ_ONCE(rfn_multicast_control) &&
			 xenbus_read_unsigned(backend, "feature-multicast-control", 0),
		.queues = clamp_t(unsigned int,
				  xenbus_read_unsigned(backend, "multi-queue-max-queues", 1), 1,
				  RFN_QUEUES_MAX),
	};
}

/* Removes the keys of the connection before. A key that is not there is no error. */
static void rfn_remove_keys(struct rfn_dev *rd, struct xenbus_transaction xbt)
{
	const char *node = rd->xdev->nodename;
	char queue[16];
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(rfn_keys); i++)
		if (xenbus_exists(xbt, node, rfn_keys[i]))
			xenbus_rm(xbt, node, rfn_keys[i]);
	for (i = 0;; i++) {
		snprintf(queue, sizeof(queue), "queue-%u", i);
		if (xenbus_exists(xbt, node, queue) <= 0)
			return;
		xenbus_rm(xbt, node, queue);
	}
}

static int rfn_write_windows(struct xenbus_transaction xbt, const char *path,
			     const struct rfn_queue *q)
{
	int err;

	err = xenbus_printf(xbt, path, "ringfence-tx-window", "%u", q->tx_window.handle);
	if (!err)
		err = xenbus_printf(xbt, path, "ringfence-tx-window-references", "%u",
				    RFN_WINDOW_REFS);
	if (!err)
		err = xenbus_printf(xbt, path, "ringfence-rx-window", "%u", q->rx_window.handle);
	if (!err)
		err = xenbus_printf(xbt, path, "ringfence-rx-window-references", "%u",
				    RFN_WINDOW_REFS);
	return err;
}

static int rfn_write_channels(struct xenbus_transaction xbt, const char *path,
			      const struct rfn_queue *q)
{
	int err;

	if (q->channels == 1)
		return xenbus_printf(xbt, path, "event-channel", "%u", q->channel[0].port);
	err = xenbus_printf(xbt, path, "event-channel-tx", "%u", q->channel[0].port);
	return err ? err : xenbus_printf(xbt, path, "event-channel-rx", "%u", q->channel[1].port);
}

static int rfn_write_queue(struct rfn_dev *rd, struct xenbus_transaction xbt,
			   const struct rfn_queue *q)
{
	char *path;
	int err;

	path = rd->queues == 1 ? kstrdup(rd->xdev->nodename, GFP_KERNEL) :
				 kasprintf(GFP_KERNEL, "%s/queue-%u", rd->xdev->nodename, q->index);
	if (!path)
		return -ENOMEM;
	err = xenbus_printf(xbt, path, "tx-ring-ref", "%u", q->tx_ring.ref);
	if (!err)
		err = xenbus_printf(xbt, path, "rx-ring-ref", "%u", q->rx_ring.ref);
	if (!err)
		err = rfn_write_channels(xbt, path, q);
	if (!err && q->windows)
		err = rfn_write_windows(xbt, path, q);
	kfree(path);
	return err;
}

static int rfn_write_keys(struct rfn_dev *rd, struct xenbus_transaction xbt)
{
	static const struct {
		const char *key, *value;
	} features[] = {
		{ "request-rx-copy", "1" },
		{ "feature-rx-notify", "1" },
		{ "feature-sg", "1" },
		{ "feature-gso-tcpv4", "1" },
		{ "feature-gso-tcpv6", "1" },
		{ "feature-ipv6-csum-offload", "1" },
		{ "feature-no-csum-offload", "0" },
	};
	const char *node = rd->xdev->nodename;
	unsigned int i;
	int err = 0;

	rfn_remove_keys(rd, xbt);
	if (rd->queues > 1)
		err = xenbus_printf(xbt, node, "multi-queue-num-queues", "%u", rd->queues);
	for (i = 0; !err && i < rd->queues; i++)
		err = rfn_write_queue(rd, xbt, rd->queue[i]);
	if (!err && rd->ctrl.usable) {
		err = xenbus_printf(xbt, node, "ctrl-ring-ref", "%u", rd->ctrl.ring_page.ref);
		if (!err)
			err = xenbus_printf(xbt, node, "event-channel-ctrl", "%u", rd->ctrl.port);
	}
	for (i = 0; !err && i < ARRAY_SIZE(features); i++)
		err = xenbus_write(xbt, node, features[i].key, features[i].value);
	return err;
}

static int rfn_publish(struct rfn_dev *rd)
{
	struct xenbus_transaction xbt;
	int err;

	do {
		err = xenbus_transaction_start(&xbt);
		if (err)
			break;
		err = rfn_write_keys(rd, xbt);
		if (err) {
			xenbus_transaction_end(xbt, 1);
			break;
		}
		err = xenbus_transaction_end(xbt, 0);
	} while (err == -EAGAIN);
	return err;
}

/* Removes the keys of this connection, so that another driver finds none of them. */
void rfn_forget_keys(struct rfn_dev *rd)
{
	rfn_remove_keys(rd, XBT_NIL);
}

static void rfn_carrier(struct rfn_dev *rd)
{
	if (READ_ONCE(rd->peer_connected) && xenbus_read_unsigned(rd->xdev->otherend, "carrier", 1))
		netif_carrier_on(rd->ndev);
	else
		netif_carrier_off(rd->ndev);
}

static void rfn_carrier_changed(struct xenbus_watch *watch, const char *path, const char *token)
{
	rfn_carrier(container_of(watch, struct rfn_dev, carrier_watch));
}

/* Follows the backend's link state. Called without RTNL. */
void rfn_watch_carrier(struct rfn_dev *rd)
{
	if (!rd->carrier_watched)
		rd->carrier_watched = !xenbus_watch_pathfmt(rd->xdev, &rd->carrier_watch, NULL,
							    rfn_carrier_changed, "%s/carrier",
							    rd->xdev->otherend);
	rfn_carrier(rd);
}

/*
 * Ends that. Only for callbacks of a watch, and without rfn_dev.lock for remove and resume: it
 * waits for the callback of a watch that runs, which may be rfn_backend_changed() waiting for that
 * lock.
 */
void rfn_unwatch_carrier(struct rfn_dev *rd)
{
	if (!rd->carrier_watched)
		return;
	unregister_xenbus_watch(&rd->carrier_watch);
	kfree(rd->carrier_watch.node);
	rd->carrier_watch.node = NULL;
	rd->carrier_watched = false;
}

/*
 * Starts NAPI and lets packets in. Called under RTNL, for an interface that is up and connected.
 * Does nothing if the next connection is awaited, with another number of queues.
 */
void rfn_start_sending(struct rfn_dev *rd)
{
	unsigned int i;

	if (rd->running || rd->ndev->real_num_tx_queues != rd->queues)
		return;
	for (i = 0; i < rd->queues; i++)
		rfn_queue_enable(rd->queue[i]);
	WRITE_ONCE(rd->running, true);
	netif_tx_wake_all_queues(rd->ndev);
}

/* Stops packets and NAPI. Afterwards nothing touches the queues. Called under RTNL. */
void rfn_stop_sending(struct rfn_dev *rd)
{
	unsigned int i;

	if (!rd->running)
		return;
	WRITE_ONCE(rd->running, false);
	/* Takes each TX lock once: no sender is left that has seen `running`. */
	netif_tx_disable(rd->ndev);
	for (i = 0; i < rd->queues; i++)
		rfn_queue_disable(rd->queue[i]);
}

static void rfn_destroy_queues(struct rfn_dev *rd)
{
	unsigned int count = rd->queues, i;

	spin_lock_bh(&rd->stats_lock);
	for (i = 0; i < count; i++)
		rfn_queue_stats(rd->queue[i], &rd->stats_before[i]);
	rd->queues = 0;
	spin_unlock_bh(&rd->stats_lock);
	for (i = 0; i < count; i++) {
		rfn_queue_destroy(rd->queue[i]);
		netdev_tx_reset_queue(netdev_get_tx_queue(rd->ndev, i));
	}
	kfree(rd->queue);
	rd->queue = NULL;
}

static int rfn_create_queues(struct rfn_dev *rd)
{
	unsigned int count = clamp(rd->queues_wanted, 1U, rd->peer.queues);
	int err;

	rd->queue = kcalloc(count, sizeof(*rd->queue), GFP_KERNEL);
	if (!rd->queue)
		return -ENOMEM;
	while (rd->queues < count) {
		struct rfn_queue *q = rfn_queue_create(rd, rd->queues);

		if (IS_ERR(q)) {
			/* Fewer queues will do, unless this one lacks a window only. */
			if (rd->queues && !rd->windows)
				break;
			rfn_destroy_queues(rd);
			return PTR_ERR(q);
		}
		spin_lock_bh(&rd->stats_lock);
		rd->queue[rd->queues++] = q;
		spin_unlock_bh(&rd->stats_lock);
	}
	err = netif_set_real_num_tx_queues(rd->ndev, rd->queues);
	if (!err)
		err = netif_set_real_num_rx_queues(rd->ndev, rd->queues);
	if (err)
		rfn_destroy_queues(rd);
	return err;
}

/* Creates the queues, with grant windows if the connection can have them. */
static int rfn_create_queues_with_windows(struct rfn_dev *rd)
{
	int err;

	rd->no_windows = rd->windows_failed ? "their pages could not be issued" :
					      rfn_windows_refused(rd);
	rd->windows_failed = false;
	rd->windows = !rd->no_windows;
	rd->kept_pages = false;
	err = rfn_create_queues(rd);
	if (!err || !rd->windows)
		return err;
	rfn_count(rd, RFN_EV_WINDOWS_REFUSED);
	rd->no_windows = err == -ENOSPC ? "this domain may have no more" :
			 err == -EACCES ? "the security policy forbids them" :
					  "they could not be created";
	rd->windows = false;
	return rfn_create_queues(rd);
}

/* Makes everything that the backend needs, and publishes it. Called with rfn_dev.lock held. */
int rfn_connect(struct rfn_dev *rd)
{
	struct net_device *ndev = rd->ndev;
	int err;

	rfn_read_features(rd);
	if (!xenbus_read_unsigned(rd->xdev->otherend, "feature-rx-copy", 0)) {
		xenbus_dev_fatal(rd->xdev, -EOPNOTSUPP, "the backend does not copy into RX pages");
		return -EOPNOTSUPP;
	}
	rtnl_lock();
	err = rfn_create_queues_with_windows(rd);
	if (err)
		goto fail;
	rfn_hash_fill_table(rd, rd->queues);
	/* Without a control ring everything else works. */
	if (rd->peer.ctrl && rfn_ctrl_create(rd))
		netdev_warn(ndev, "no memory for the control ring\n");
	err = rfn_publish(rd);
	if (err)
		goto fail;
	rd->connected = true;
	rd->peer_connected = false;
	memset(&rd->mcast, 0, sizeof(rd->mcast));
	rd->fault = NULL;
	rfn_count(rd, RFN_EV_CONNECTS);
	ndev->max_mtu = rd->peer.sg ? RFN_TX_BYTES_MAX - VLAN_ETH_HLEN : RFN_MTU_ONE_SLOT;
	if (ndev->mtu > ndev->max_mtu)
		dev_set_mtu(ndev, ndev->max_mtu);
	netdev_update_features(ndev);
	if (netif_running(ndev))
		rfn_start_sending(rd);
	rtnl_unlock();
	return 0;
fail:
	rfn_ctrl_destroy(rd);
	rfn_destroy_queues(rd);
	rtnl_unlock();
	xenbus_dev_fatal(rd->xdev, err, "connecting");
	return err;
}

/* Takes everything back that rfn_connect() has made. Called with rfn_dev.lock held. */
void rfn_disconnect(struct rfn_dev *rd)
{
	if (!rd->connected)
		return;
	WRITE_ONCE(rd->peer_connected, false);
	rtnl_lock();
	netif_carrier_off(rd->ndev);
	rfn_stop_sending(rd);
	rd->connected = false;
	WRITE_ONCE(rd->suspended, false);
	rfn_ctrl_destroy(rd);
	rfn_destroy_queues(rd);
	atomic_set(&rd->staged, 0);
	atomic_set(&rd->tx_spare, 0);
	rtnl_unlock();
}
