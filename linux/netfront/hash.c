// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hash configuration: sends algorithm, types, key and table, as `ethtool -X` set them, to the
 * backend.
 */
#include <linux/ethtool.h>
#include "netfront.h"

#define RFN_HASH_TYPES                                                       \
	(XEN_NETIF_CTRL_HASH_TYPE_IPV4 | XEN_NETIF_CTRL_HASH_TYPE_IPV4_TCP | \
	 XEN_NETIF_CTRL_HASH_TYPE_IPV6 | XEN_NETIF_CTRL_HASH_TYPE_IPV6_TCP)

/* Fills the key, unless it was filled or set before. */
void rfn_hash_fill_key(struct rfn_dev *rd)
{
	if (!rd->hash.filled)
		netdev_rss_key_fill(rd->hash.key, RFN_HASH_KEY);
	rd->hash.filled = true;
}

/* Fills the table for so many queues, unless the user has set it. Called under RTNL. */
void rfn_hash_fill_table(struct rfn_dev *rd, unsigned int queues)
{
	int i;

	if (netif_is_rxfh_configured(rd->ndev))
		return;
	for (i = 0; i < RFN_HASH_TABLE; i++)
		rd->hash.table[i] = ethtool_rxfh_indir_default(i, queues);
}

static int rfn_hash_send(struct rfn_dev *rd)
{
	struct rfn_page *page = &rd->ctrl.list;
	u32 *table = page->va;
	int err, i;

	err = rfn_ctrl_message(rd, XEN_NETIF_CTRL_TYPE_SET_HASH_ALGORITHM,
			       XEN_NETIF_CTRL_HASH_ALGORITHM_TOEPLITZ, 0, 0, NULL);
	if (err)
		return err;
	memcpy(page->va, rd->hash.key, RFN_HASH_KEY);
	err = rfn_ctrl_message(rd, XEN_NETIF_CTRL_TYPE_SET_HASH_KEY, page->ref, RFN_HASH_KEY, 0,
			       NULL);
	if (err)
		return err;
	err = rfn_ctrl_message(rd, XEN_NETIF_CTRL_TYPE_SET_HASH_MAPPING_SIZE, RFN_HASH_TABLE, 0, 0,
			       NULL);
	if (err)
		return err;
	for (i = 0; i < RFN_HASH_TABLE; i++)
		table[i] = rd->hash.table[i] < rd->queues ? rd->hash.table[i] : 0;
	err = rfn_ctrl_message(rd, XEN_NETIF_CTRL_TYPE_SET_HASH_MAPPING, page->ref, RFN_HASH_TABLE,
			       0, NULL);
	if (err)
		return err;
	return rfn_ctrl_message(rd, XEN_NETIF_CTRL_TYPE_SET_HASH_FLAGS, RFN_HASH_TYPES, 0, 0, NULL);
}

/*
 * Sends the configuration, if there is one. For table entries beyond the queues of this connection
 * it says queue 0.
 */
int rfn_hash_apply(struct rfn_dev *rd)
{
	int err = -EOPNOTSUPP;

	if (!rd->hash.configured)
		return 0;
	mutex_lock(&rd->ctrl.lock);
	if (rd->ctrl.usable)
		err = rfn_hash_send(rd);
	mutex_unlock(&rd->ctrl.lock);
	return err;
}
