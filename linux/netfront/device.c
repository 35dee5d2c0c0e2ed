// SPDX-License-Identifier: GPL-2.0-only
/*
 * Device: the network interface of a vif, and what it does when the backend's state changes.
 *
 *   backend        this driver
 *   is InitWait    connects, says Connected
 *   is Connected   issues the pages of windows, link up, or link up and stages pages
 *   is Closing     disconnects, says Closed
 *   is Closed      disconnects, says Closed; Initialising with a restart under way (`ethtool -L`)
 *
 * A backend that waits again after it was Connected is a new one: the driver connects to it anew.
 * After a violation of the protocol the driver says Closing, and the link stays down until the
 * backend waits again.
 */
#include <linux/delay.h>
#include <linux/ethtool.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/rtnetlink.h>
#include "netfront.h"

bool rfn_windows = true;
module_param_named(windows, rfn_windows, bool, 0644);
MODULE_PARM_DESC(windows,
		 "Use grant windows with backends that open them (default: yes); read at each connection");

bool rfn_staging = true;
module_param_named(staging, rfn_staging, bool, 0644);
MODULE_PARM_DESC(staging,
		 "Stage pages at backends that offer it (default: yes); read at each connection");

bool rfn_staging_header;
module_param_named(staging_header, rfn_staging_header, bool, 0644);
MODULE_PARM_DESC(staging_header,
		 "Stage for sending only pages of the first 256 bytes of packets (default: no); read at each connection");

bool rfn_multicast_control = true;
module_param_named(multicast_control, rfn_multicast_control, bool, 0644);
MODULE_PARM_DESC(multicast_control,
		 "Have backends that can pass only the interface's multicast groups (default: yes); read at each connection");

unsigned int rfn_staging_batch = RFN_LIST_MAX;
module_param_named(staging_batch, rfn_staging_batch, uint, 0644);
MODULE_PARM_DESC(staging_batch, "Pages in one list for the backend, 1 to 128 (default: 128)");

static unsigned int rfn_max_queues;
module_param_named(max_queues, rfn_max_queues, uint, 0444);
MODULE_PARM_DESC(max_queues,
		 "Queues of an interface, 1 to 16 (default: 0, one for each CPU, at most 8)");

/* Time that the backend has to close when the driver lets go of a device. */
#define RFN_CLOSE_MS 5000

static int rfn_open(struct net_device *ndev)
{
	struct rfn_dev *rd = netdev_priv(ndev);

	if (rd->connected)
		rfn_start_sending(rd);
	return 0;
}

static int rfn_stop(struct net_device *ndev)
{
	rfn_stop_sending(netdev_priv(ndev));
	return 0;
}

static void rfn_get_stats64(struct net_device *ndev, struct rtnl_link_stats64 *sum)
{
	struct rfn_dev *rd = netdev_priv(ndev);
	unsigned int i;

	spin_lock_bh(&rd->stats_lock);
	for (i = 0; i < RFN_QUEUES_MAX; i++)
		rfn_index_stats(rd, i, sum);
	spin_unlock_bh(&rd->stats_lock);
}

static netdev_features_t rfn_fix_features(struct net_device *ndev, netdev_features_t features)
{
	const struct rfn_dev *rd = netdev_priv(ndev);

	if (!rd->peer.sg)
		features &= ~(NETIF_F_SG | NETIF_F_TSO | NETIF_F_TSO6);
	if (!rd->peer.csum4)
		features &= ~(NETIF_F_IP_CSUM | NETIF_F_TSO);
	if (!rd->peer.csum6)
		features &= ~(NETIF_F_IPV6_CSUM | NETIF_F_TSO6);
	if (!rd->peer.gso4)
		features &= ~NETIF_F_TSO;
	if (!rd->peer.gso6)
		features &= ~NETIF_F_TSO6;
	return features;
}

static const struct net_device_ops rfn_netdev_ops = {
	.ndo_open = rfn_open,
	.ndo_stop = rfn_stop,
	.ndo_start_xmit = rfn_start_xmit,
	.ndo_get_stats64 = rfn_get_stats64,
	.ndo_set_rx_mode = rfn_mcast_changed,
	.ndo_set_mac_address = eth_mac_addr,
	.ndo_validate_addr = eth_validate_addr,
	.ndo_fix_features = rfn_fix_features,
};

/* Notes a violation of the protocol; a work item ends the connection. Callable from NAPI. */
void rfn_fault(struct rfn_dev *rd, unsigned int queue, const char *why)
{
	if (cmpxchg(&rd->fault, NULL, why))
		return;
	rd->fault_queue = queue;
	rfn_count(rd, RFN_EV_FAULTS);
	schedule_work(&rd->fault_work);
}

static void rfn_fault_work(struct work_struct *work)
{
	struct rfn_dev *rd = container_of(work, struct rfn_dev, fault_work);

	rfn_ctrl_kill(rd);
	mutex_lock(&rd->lock);
	if (rd->connected && rd->fault && !rd->leaving) {
		const char *why = rd->fault;

		rfn_disconnect(rd);
		netdev_err(rd->ndev,
			   "the backend, domain %d, broke the protocol on queue %u: %s; the link is down\n",
			   rd->xdev->otherend_id, rd->fault_queue, why);
		rd->closing = true;
		xenbus_dev_error(rd->xdev, -EPROTO, "%s", why);
		xenbus_switch_state(rd->xdev, XenbusStateClosing);
	}
	mutex_unlock(&rd->lock);
}

/*
 * Makes the connection anew after a suspension that was cancelled. The work queue does not run
 * before the guest does; a resumed guest has dropped the connection by then.
 */
static void rfn_thaw_work(struct work_struct *work)
{
	struct rfn_dev *rd = container_of(work, struct rfn_dev, thaw_work);

	if (READ_ONCE(rd->suspended))
		schedule_work(&rd->restart_work);
}

/* Closes the connection in order; rfn_backend_changed() opens the next one. */
static void rfn_restart_work(struct work_struct *work)
{
	struct rfn_dev *rd = container_of(work, struct rfn_dev, restart_work);

	mutex_lock(&rd->lock);
	if (rd->connected && !rd->leaving) {
		rtnl_lock();
		rfn_stop_sending(rd);
		rtnl_unlock();
		rfn_unstage_all(rd);
		rd->restarting = true;
		rd->closing = true;
		xenbus_switch_state(rd->xdev, XenbusStateClosing);
	}
	mutex_unlock(&rd->lock);
}

/* Does what waits for control messages, once both sides are Connected. */
static void rfn_ready_work(struct work_struct *work)
{
	struct rfn_dev *rd = container_of(work, struct rfn_dev, ready_work);
	unsigned int i;

	mutex_lock(&rd->lock);
	if (rd->connected && rd->peer_connected && !rd->leaving) {
		if (rfn_hash_apply(rd))
			netdev_warn(rd->ndev, "the backend refuses the hash configuration\n");
		/* Not earlier: a packet goes only to queues that the hash configuration names. */
		for (i = 0; i < rd->queues; i++)
			rfn_queue_post(rd->queue[i]);
		if (!rd->windows)
			rfn_stage_all(rd);
		rfn_mcast_changed(rd->ndev);
	}
	mutex_unlock(&rd->lock);
}

static void rfn_backend_waits(struct rfn_dev *rd)
{
	struct xenbus_device *xdev = rd->xdev;

	/* The backend has not looked at the keys yet. */
	if (rd->connected && !rd->peer_connected)
		return;
	rfn_disconnect(rd);
	rfn_unwatch_carrier(rd);
	if (xdev->state != XenbusStateInitialising)
		xenbus_switch_state(xdev, XenbusStateInitialising);
	rd->closing = false;
	rd->restarting = false;
	if (!rfn_connect(rd))
		xenbus_switch_state(xdev, XenbusStateConnected);
}

static void rfn_backend_ready(struct rfn_dev *rd)
{
	int err;

	if (!rd->connected || rd->peer_connected || rd->closing)
		return;
	WRITE_ONCE(rd->peer_connected, true);
	err = rd->windows ? rfn_windows_issue(rd) : 0;
	if (err) {
		netdev_warn(rd->ndev,
			    "pages cannot be issued in grant windows (%d); connects anew without\n",
			    err);
		rfn_count(rd, RFN_EV_WINDOWS_REFUSED);
		rd->windows_failed = true;
		schedule_work(&rd->restart_work);
		return;
	}
	rfn_watch_carrier(rd);
	netdev_notify_peers(rd->ndev);
	schedule_work(&rd->ready_work);
}

static void rfn_backend_closes(struct rfn_dev *rd, enum xenbus_state state)
{
	struct xenbus_device *xdev = rd->xdev;

	if (rd->connected || rd->closing || !xenbus_read_unsigned(xdev->otherend, "online", 0)) {
		rfn_disconnect(rd);
		rfn_unwatch_carrier(rd);
		if (xdev->state != XenbusStateClosed)
			xenbus_frontend_closed(xdev);
	}
	if (state == XenbusStateClosed && rd->restarting) {
		rd->restarting = false;
		rd->closing = false;
		xenbus_switch_state(xdev, XenbusStateInitialising);
	}
}

static void rfn_backend_changed(struct xenbus_device *xdev, enum xenbus_state state)
{
	struct rfn_dev *rd = dev_get_drvdata(&xdev->dev);

	if (state == XenbusStateClosing || state == XenbusStateClosed)
		rfn_ctrl_kill(rd);
	mutex_lock(&rd->lock);
	switch (state) {
	case XenbusStateInitWait:
		rfn_backend_waits(rd);
		break;
	case XenbusStateConnected:
		rfn_backend_ready(rd);
		break;
	case XenbusStateClosing:
	case XenbusStateClosed:
		rfn_backend_closes(rd, state);
		break;
	default:
		break;
	}
	mutex_unlock(&rd->lock);
}

static void rfn_read_address(struct xenbus_device *xdev, struct net_device *ndev)
{
	u8 address[ETH_ALEN];
	char *text;

	text = xenbus_read(XBT_NIL, xdev->nodename, "mac", NULL);
	if (!IS_ERR(text) && mac_pton(text, address) && is_valid_ether_addr(address)) {
		eth_hw_addr_set(ndev, address);
	} else {
		eth_hw_addr_random(ndev);
		dev_warn(&xdev->dev, "no usable key `mac`; the address is random\n");
	}
	if (!IS_ERR(text))
		kfree(text);
}

static void rfn_init_netdev(struct xenbus_device *xdev, struct net_device *ndev)
{
	unsigned int mtu = xenbus_read_unsigned(xdev->nodename, "mtu", ETH_DATA_LEN);

	ndev->netdev_ops = &rfn_netdev_ops;
	ndev->ethtool_ops = &rfn_ethtool_ops;
	rfn_set_stat_ops(ndev);
	ndev->hw_features = NETIF_F_SG | NETIF_F_IP_CSUM | NETIF_F_IPV6_CSUM | NETIF_F_TSO |
			    NETIF_F_TSO6 | NETIF_F_RXCSUM;
	ndev->features |= ndev->hw_features;
	/* No part of a connection depends on the address. */
	ndev->priv_flags |= IFF_LIVE_ADDR_CHANGE;
	ndev->min_mtu = ETH_MIN_MTU;
	ndev->max_mtu = RFN_TX_BYTES_MAX - VLAN_ETH_HLEN;
	if (mtu >= ndev->min_mtu && mtu <= ndev->max_mtu)
		ndev->mtu = mtu;
	/* With headers a packet stays within the 16 bits of the size field. */
	netif_set_tso_max_size(ndev, RFN_TX_BYTES_MAX - VLAN_ETH_HLEN);
	SET_NETDEV_DEV(ndev, &xdev->dev);
	rfn_read_address(xdev, ndev);
	/* Until it is connected. Cannot fail before the interface is registered. */
	netif_set_real_num_queues(ndev, 1, 1);
	netif_carrier_off(ndev);
}

static int rfn_probe(struct xenbus_device *xdev, const struct xenbus_device_id *id)
{
	struct net_device *ndev;
	struct rfn_dev *rd;
	int err;

	ndev = alloc_etherdev_mq(sizeof(*rd), RFN_QUEUES_MAX);
	if (!ndev)
		return -ENOMEM;
	rd = netdev_priv(ndev);
	rd->xdev = xdev;
	rd->ndev = ndev;
	rd->queues_wanted = rfn_max_queues ? min_t(unsigned int, rfn_max_queues, RFN_QUEUES_MAX) :
					     min_t(unsigned int, num_online_cpus(), 8);
	mutex_init(&rd->lock);
	mutex_init(&rd->ctrl.lock);
	spin_lock_init(&rd->stats_lock);
	init_waitqueue_head(&rd->ctrl.wait);
	INIT_WORK(&rd->fault_work, rfn_fault_work);
	INIT_WORK(&rd->restart_work, rfn_restart_work);
	INIT_WORK(&rd->ready_work, rfn_ready_work);
	INIT_WORK(&rd->shrink_work, rfn_shrink_work);
	INIT_WORK(&rd->thaw_work, rfn_thaw_work);
	INIT_DELAYED_WORK(&rd->mcast_work, rfn_mcast_work);
	rfn_init_netdev(xdev, ndev);
	dev_set_drvdata(&xdev->dev, rd);
	err = register_netdev(ndev);
	if (err) {
		dev_set_drvdata(&xdev->dev, NULL);
		free_netdev(ndev);
		return err;
	}
	rfn_shrinker_add(rd);
	/* A backend that another driver has left waits for this. */
	xenbus_switch_state(xdev, XenbusStateInitialising);
	return 0;
}

/* Polls the backend's state until it is one of both, for a bounded time. */
static void rfn_await_backend(struct xenbus_device *xdev, enum xenbus_state one,
			      enum xenbus_state other)
{
	unsigned int waited;

	for (waited = 0; waited < RFN_CLOSE_MS; waited += 20) {
		enum xenbus_state state = xenbus_read_driver_state(xdev->otherend);

		if (state == one || state == other || state == XenbusStateUnknown)
			return;
		msleep(20);
	}
	dev_warn(&xdev->dev,
		 "the backend did not close; the pages that it has mapped are freed when it unmaps them\n");
}

static void rfn_remove(struct xenbus_device *xdev)
{
	struct rfn_dev *rd = dev_get_drvdata(&xdev->dev);

	rfn_shrinker_del(rd);
	mutex_lock(&rd->lock);
	rd->leaving = true;
	if (rd->connected) {
		rtnl_lock();
		rfn_stop_sending(rd);
		rtnl_unlock();
		rfn_unstage_all(rd);
		xenbus_switch_state(xdev, XenbusStateClosing);
		rfn_await_backend(xdev, XenbusStateClosing, XenbusStateClosed);
	}
	rfn_disconnect(rd);
	rfn_forget_keys(rd);
	xenbus_switch_state(xdev, XenbusStateClosed);
	rfn_await_backend(xdev, XenbusStateClosed, XenbusStateInitWait);
	mutex_unlock(&rd->lock);
	rfn_unwatch_carrier(rd);
	cancel_work_sync(&rd->fault_work);
	cancel_work_sync(&rd->thaw_work);
	cancel_work_sync(&rd->restart_work);
	cancel_work_sync(&rd->ready_work);
	cancel_work_sync(&rd->shrink_work);
	unregister_netdev(rd->ndev);
	/* The interface may change its groups until here. */
	cancel_delayed_work_sync(&rd->mcast_work);
	dev_set_drvdata(&xdev->dev, NULL);
	free_netdev(rd->ndev);
}

/*
 * Closes the windows before the guest is suspended. The domain that resumes may be another one,
 * whose windows can have the same handles.
 */
static int rfn_suspend(struct xenbus_device *xdev)
{
	struct rfn_dev *rd = dev_get_drvdata(&xdev->dev);

	mutex_lock(&rd->lock);
	if (rd->connected && rd->windows) {
		rfn_windows_close(rd);
		WRITE_ONCE(rd->suspended, true);
		queue_work(system_freezable_wq, &rd->thaw_work);
	}
	mutex_unlock(&rd->lock);
	return 0;
}

/* Drops the connection of the host before: its rings, grants and channels are gone. */
static int rfn_resume(struct xenbus_device *xdev)
{
	struct rfn_dev *rd = dev_get_drvdata(&xdev->dev);

	rfn_ctrl_kill(rd);
	mutex_lock(&rd->lock);
	rd->closing = false;
	rd->restarting = false;
	rfn_disconnect(rd);
	mutex_unlock(&rd->lock);
	rfn_unwatch_carrier(rd);
	return 0;
}

static const struct xenbus_device_id rfn_ids[] = { { "vif" }, { "" } };

static struct xenbus_driver rfn_driver = {
	.name = RFN_NAME,
	.ids = rfn_ids,
	.probe = rfn_probe,
	.remove = rfn_remove,
	.suspend = rfn_suspend,
	.resume = rfn_resume,
	.otherend_changed = rfn_backend_changed,
};

static int __init rfn_init(void)
{
	int err;

	BUILD_BUG_ON(sizeof(struct rfn_gref) != 8);
	BUILD_BUG_ON(RFN_RING % GRANT_WINDOW_BATCH);
	BUILD_BUG_ON(sizeof(struct xen_netif_tx_request) != 12);
	BUILD_BUG_ON(sizeof(struct xen_netif_rx_request) != 8);
	BUILD_BUG_ON(sizeof(struct xen_netif_ctrl_request) != 16);
	if (!xen_domain())
		return -ENODEV;
	err = rfn_shrinker_register();
	if (err)
		return err;
	err = xenbus_register_frontend(&rfn_driver);
	if (err)
		rfn_shrinker_unregister();
	return err;
}
module_init(rfn_init);

static void __exit rfn_exit(void)
{
	xenbus_unregister_driver(&rfn_driver);
	rfn_shrinker_unregister();
}
module_exit(rfn_exit);

MODULE_DESCRIPTION("Network interface of a Xen guest, with grant windows and staging grants");
MODULE_AUTHOR("Ringfence developers");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
MODULE_ALIAS("xen:vif");
