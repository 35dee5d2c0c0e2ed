// SPDX-License-Identifier: GPL-2.0-only
/*
 * Multicast control: tells the backend the groups of the interface, so that frames to other groups
 * cost nothing.
 *
 * A change of the interface's list schedules a work item. It compares the list with what the
 * backend has, and sends a request for each difference on queue 0. Only when the backend has all
 * groups does the store's key `request-multicast-control` ask it to filter. An interface in
 * promiscuous mode, or with more groups than a backend takes, is not filtered. A backend that
 * refuses a change filters no more in this connection.
 */
#include "netfront.h"

/* Time to wait for room in the TX ring. */
#define RFN_MCAST_RETRY (HZ / 10)

/* Groups that the interface wants. */
struct rfn_groups {
	u8 group[RFN_GROUPS_MAX][ETH_ALEN] __aligned(2);
	unsigned int count;
	/* Every group. */
	bool all;
};

static bool rfn_group_in(const u8 (*groups)[ETH_ALEN], unsigned int count, const u8 *group)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		if (ether_addr_equal(groups[i], group))
			return true;
	return false;
}

static void rfn_groups_wanted(struct net_device *ndev, struct rfn_groups *wanted)
{
	struct netdev_hw_addr *address;

	memset(wanted, 0, sizeof(*wanted));
	netif_addr_lock_bh(ndev);
	wanted->all = ndev->flags & (IFF_PROMISC | IFF_ALLMULTI) ||
		      netdev_mc_count(ndev) > RFN_GROUPS_MAX;
	if (!wanted->all)
		netdev_for_each_mc_addr(address, ndev)
			ether_addr_copy(wanted->group[wanted->count++], address->addr);
	netif_addr_unlock_bh(ndev);
}

static void rfn_mcast_ask(struct rfn_dev *rd, bool on)
{
	if (rd->mcast.on == on)
		return;
	if (!xenbus_printf(XBT_NIL, rd->xdev->nodename, "request-multicast-control", "%u", on))
		rd->mcast.on = on;
}

/* Sends the differences. Returns false if the ring has no room for all of them. */
static bool rfn_mcast_send(struct rfn_dev *rd, const struct rfn_groups *wanted)
{
	struct rfn_mcast *mcast = &rd->mcast;
	unsigned int i = 0;

	/* Removes first: the backend's list is short. */
	while (i < mcast->groups) {
		if (rfn_group_in(wanted->group, wanted->count, mcast->group[i])) {
			i++;
			continue;
		}
		if (!rfn_tx_filter(rd->queue[0], false, mcast->group[i]))
			return false;
		ether_addr_copy(mcast->group[i], mcast->group[--mcast->groups]);
	}
	for (i = 0; i < wanted->count; i++) {
		if (rfn_group_in(mcast->group, mcast->groups, wanted->group[i]))
			continue;
		if (!rfn_tx_filter(rd->queue[0], true, wanted->group[i]))
			return false;
		ether_addr_copy(mcast->group[mcast->groups++], wanted->group[i]);
	}
	return true;
}

void rfn_mcast_work(struct work_struct *work)
{
	struct rfn_dev *rd = container_of(to_delayed_work(work), struct rfn_dev, mcast_work);
	struct rfn_groups *wanted;

	wanted = kmalloc(sizeof(*wanted), GFP_KERNEL);
	mutex_lock(&rd->lock);
	if (rd->connected && rd->peer_connected && rd->peer.mcast && !rd->leaving) {
		if (wanted)
			rfn_groups_wanted(rd->ndev, wanted);
		if (!wanted || wanted->all || READ_ONCE(rd->mcast.refused))
			rfn_mcast_ask(rd, false);
		else if (rfn_mcast_send(rd, wanted))
			rfn_mcast_ask(rd, true);
		else if (READ_ONCE(rd->running))
			schedule_delayed_work(&rd->mcast_work, RFN_MCAST_RETRY);
	}
	mutex_unlock(&rd->lock);
	kfree(wanted);
}

/* Takes note of a change of the interface's groups. The caller must not sleep. */
void rfn_mcast_changed(struct net_device *ndev)
{
	struct rfn_dev *rd = netdev_priv(ndev);

	if (READ_ONCE(rd->peer_connected) && rd->peer.mcast)
		schedule_delayed_work(&rd->mcast_work, 0);
}
