// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pools, the devices that use them, and the module.
 *
 * A pool is BAR 2 of QEMU's device ivshmem-plain. Other programs use that device, too, so a pool
 * has a mark in its first bytes. The host writes it, or this module for the pools that the
 * parameter `pools` names. A pool holds nothing of the machine, so a backend that maps it sees no
 * more than it is lent.
 *
 * A virtio function gets the operations of a pool before its driver binds. Where virtio_pci has
 * bound already (it may be built in), only the driver of the virtio device is bound again: it is
 * the one that has allocated rings.
 */
#include <linux/blkdev.h>
#include <linux/io.h>
#include <linux/iommu.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#ifdef CONFIG_X86
#include <asm/pgtable.h>
#endif
#include "lent-pool.h"

#define IVSHMEM_BAR 2
#define IVSHMEM_DEVICE 0x1110
#define VIRTIO_NET_DEVICE 0x1041
#define VIRTIO_BLOCK_DEVICE 0x1042

static char *devices = "";
module_param(devices, charp, 0444);
MODULE_PARM_DESC(devices,
		 "PCI addresses of virtio functions that use a pool, each with @POOL for the pool at that address; without any, all network cards and disks");

static char *pools = "";
module_param(pools, charp, 0444);
MODULE_PARM_DESC(pools, "PCI addresses of pools without a mark, which get one");

/* Device that uses a pool. */
struct device_entry {
	struct list_head entry;
	struct pci_dev *pdev;
};

static DEFINE_MUTEX(rlp_lock);
static LIST_HEAD(all_pools);

/*
 * Finds a PCI address in a list. Returns true for a match, and sets *pool to what follows an @,
 * whose length is *len.
 */
static bool is_listed(const char *list, const char *name, const char **pool, size_t *len)
{
	size_t name_len = strlen(name);

	while (*list) {
		size_t word = strcspn(list, ",");

		if (word >= name_len && !strncmp(list, name, name_len) &&
		    (word == name_len || list[name_len] == '@')) {
			*len = word > name_len ? word - name_len - 1 : 0;
			*pool = *len ? list + name_len + 1 : NULL;
			return true;
		}
		list += word;
		list += *list == ',';
	}
	return false;
}

/* Returns true if a function is to use a pool. *pool is the address of a certain one, or NULL. */
static bool is_chosen(struct pci_dev *pdev, const char **pool, size_t *len)
{
	*pool = NULL;
	*len = 0;
	if (pdev->vendor != PCI_VENDOR_ID_REDHAT_QUMRANET)
		return false;
	if (*devices)
		return is_listed(devices, pci_name(pdev), pool, len);
	return pdev->device == VIRTIO_NET_DEVICE || pdev->device == VIRTIO_BLOCK_DEVICE;
}

/* Returns true if the parameter gives this pool to a device. */
static bool is_given(const struct rlp_pool *pool)
{
	const char *name = pci_name(pool->pdev), *found = devices;
	size_t len = strlen(name);

	while ((found = strchr(found, '@'))) {
		found++;
		if (!strncmp(found, name, len) && (!found[len] || found[len] == ','))
			return true;
	}
	return false;
}

/* Returns the pool at an address, or without one the first pool that no device was given. */
static struct rlp_pool *find_pool(const char *name, size_t len)
{
	struct rlp_pool *pool;

	lockdep_assert_held(&rlp_lock);
	list_for_each_entry(pool, &all_pools, entry) {
		const char *own = pci_name(pool->pdev);

		if (name ? strlen(own) == len && !strncmp(own, name, len) : !is_given(pool))
			return pool;
	}
	return NULL;
}

/* Returns true if a function is to get a pool that is there, and has none. */
static bool wants_pool(struct pci_dev *pdev)
{
	const char *name;
	bool wants;
	size_t len;

	if (!is_chosen(pdev, &name, &len) || get_dma_ops(&pdev->dev))
		return false;
	mutex_lock(&rlp_lock);
	wants = find_pool(name, len);
	mutex_unlock(&rlp_lock);
	if (wants && device_iommu_mapped(&pdev->dev)) {
		pci_warn(pdev, "is behind an IOMMU, so it gets no pool\n");
		return false;
	}
	return wants;
}

/* Gives a function that wants it the operations of its pool. */
static void attach(struct pci_dev *pdev)
{
	struct device_entry *device;
	struct rlp_pool *pool;
	const char *name;
	size_t len;

	device = kzalloc(sizeof(*device), GFP_KERNEL);
	if (!device)
		return;
	is_chosen(pdev, &name, &len);
	mutex_lock(&rlp_lock);
	pool = find_pool(name, len);
	if (!pool) {
		mutex_unlock(&rlp_lock);
		kfree(device);
		return;
	}
	/* What another device has left in the pool is not for this one. */
	WRITE_ONCE(pool->zeroes, pool->users > 0);
	rlp_pool_scrub(pool);
	device->pdev = pci_dev_get(pdev);
	list_add(&device->entry, &pool->devices);
	WRITE_ONCE(pool->users, pool->users + 1);
	set_dma_ops(&pdev->dev, &pool->ops);
	/*
	 * Kernels from 6.10 on decide with the mask if data are synchronised at all. virtio_pci may
	 * have set it before, with the direct operations.
	 */
	dma_set_mask(&pdev->dev, DMA_BIT_MASK(64));
	pci_info(pdev, "lends its backend the pool %s\n", pci_name(pool->pdev));
	mutex_unlock(&rlp_lock);
}

static void forget(struct rlp_pool *pool, struct device_entry *device)
{
	lockdep_assert_held(&rlp_lock);
	set_dma_ops(&device->pdev->dev, NULL);
	list_del(&device->entry);
	WRITE_ONCE(pool->users, pool->users - 1);
	pci_dev_put(device->pdev);
	kfree(device);
}

/* Takes the operations of a pool from a function without a driver. */
static void detach_from(struct rlp_pool *pool, struct pci_dev *pdev)
{
	struct device_entry *device, *next;

	list_for_each_entry_safe(device, next, &pool->devices, entry)
		if (device->pdev == pdev)
			forget(pool, device);
}

static void detach(struct pci_dev *pdev)
{
	struct rlp_pool *pool;

	mutex_lock(&rlp_lock);
	list_for_each_entry(pool, &all_pools, entry)
		detach_from(pool, pdev);
	mutex_unlock(&rlp_lock);
}

/* Returns true if a function is bound, or binds, to virtio-pci and not to a driver for programs. */
static bool is_of_virtio_pci(struct pci_dev *pdev)
{
	return pdev->dev.driver && !strcmp(pdev->dev.driver->name, "virtio-pci");
}

/* Returns true for the virtio device below a function. */
static bool is_virtio(struct device *dev)
{
	return dev->bus && !strcmp(dev->bus->name, "virtio");
}

/* Kernels from 6.17 on have more features than 64 bits hold, and devices without get_features. */
#if defined(VIRTIO_FEATURES_U64S)
#define RLP_FEATURES_U64S VIRTIO_FEATURES_U64S
#elif defined(VIRTIO_FEATURES_DWORDS)
#define RLP_FEATURES_U64S VIRTIO_FEATURES_DWORDS
#endif

/* Returns true if a device is told addresses of its platform. */
static bool offers_platform(struct virtio_device *vdev)
{
#ifdef RLP_FEATURES_U64S
	u64 features[RLP_FEATURES_U64S];

	virtio_get_features(vdev, features);
	return features[0] & BIT_ULL(VIRTIO_F_ACCESS_PLATFORM);
#else
	return vdev->config->get_features(vdev) & BIT_ULL(VIRTIO_F_ACCESS_PLATFORM);
#endif
}

static int warn_without_feature(struct device *child, void *unused)
{
	if (is_virtio(child) && !offers_platform(dev_to_virtio(child)))
		dev_warn(child,
			 "uses no pool: it does not offer ACCESS_PLATFORM (QEMU: iommu_platform=on)\n");
	return 0;
}

static int is_open_disk(struct device *dev, void *unused)
{
	bool is_disk = dev->class && !strcmp(dev->class->name, "block");

	return is_disk && disk_openers(dev_to_disk(dev)) > 0;
}

static int is_in_use(struct device *child, void *unused)
{
	return is_virtio(child) && device_for_each_child(child, NULL, is_open_disk);
}

static int release_driver(struct device *child, void *unused)
{
	if (is_virtio(child) && child->driver)
		device_release_driver(child);
	return 0;
}

static int bind_driver(struct device *child, void *unused)
{
	if (is_virtio(child) && device_attach(child) < 0)
		dev_err(child, "its driver does not bind again\n");
	return 0;
}

/* Attaches functions to which virtio_pci has bound before there was a pool. */
static void attach_bound(void)
{
	struct pci_dev *pdev = NULL;

	for_each_pci_dev(pdev) {
		if (!is_of_virtio_pci(pdev) || !wants_pool(pdev))
			continue;
		if (device_for_each_child(&pdev->dev, NULL, is_in_use)) {
			pci_warn(pdev, "is in use without a pool: load %s before its driver\n",
				 RLP_NAME);
			continue;
		}
		device_for_each_child(&pdev->dev, NULL, release_driver);
		attach(pdev);
		device_for_each_child(&pdev->dev, NULL, warn_without_feature);
		device_for_each_child(&pdev->dev, NULL, bind_driver);
	}
}

static int pci_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct pci_dev *pdev = to_pci_dev((struct device *)data);

	switch (event) {
	case BUS_NOTIFY_BIND_DRIVER:
		if (is_of_virtio_pci(pdev) && wants_pool(pdev))
			attach(pdev);
		break;
	case BUS_NOTIFY_BOUND_DRIVER:
		if (get_dma_ops(&pdev->dev) && pdev->vendor == PCI_VENDOR_ID_REDHAT_QUMRANET)
			device_for_each_child(&pdev->dev, NULL, warn_without_feature);
		break;
	case BUS_NOTIFY_UNBOUND_DRIVER:
	case BUS_NOTIFY_DRIVER_NOT_BOUND:
	case BUS_NOTIFY_REMOVED_DEVICE:
		detach(pdev);
		break;
	}
	return NOTIFY_DONE;
}

static struct notifier_block pci_events = { .notifier_call = pci_event };

/* Copies are many times slower in a pool that is not cached. */
static void check_cache(struct rlp_pool *pool)
{
#ifdef CONFIG_X86
	unsigned int level;
	pte_t *pte = lookup_address((unsigned long)pool->va, &level);

	if (pte && pte_flags(*pte) & (_PAGE_PCD | _PAGE_PWT))
		pci_warn(pool->pdev,
			 "the pool at %pa is not cached, so devices are slow: have the firmware place it above 4 GiB\n",
			 &pool->pa);
#endif
}

/* Returns true if the memory is a pool. Marks it where the parameter says that it is one. */
static bool has_mark(struct rlp_pool *pool)
{
	const char *unused;
	size_t len;

	if (!memcmp(pool->va, RLP_MARK, RLP_MARK_LEN))
		return true;
	if (!is_listed(pools, pci_name(pool->pdev), &unused, &len))
		return false;
	memcpy(pool->va, RLP_MARK, RLP_MARK_LEN);
	return true;
}

static int pool_map(struct rlp_pool *pool)
{
	struct pci_dev *pdev = pool->pdev;

	pool->pa = pci_resource_start(pdev, IVSHMEM_BAR);
	pool->size = pci_resource_len(pdev, IVSHMEM_BAR);
	if (pool->size < RLP_SIZE_MIN) {
		if (is_given(pool))
			pci_err(pdev, "the pool has %zu KiB, less than %lu\n", pool->size >> 10,
				RLP_SIZE_MIN >> 10);
		return -ENODEV;
	}
	pool->va = memremap(pool->pa, pool->size, MEMREMAP_WB);
	if (!pool->va)
		return -ENOMEM;
	return has_mark(pool) ? 0 : -ENODEV;
}

static void pool_free(struct rlp_pool *pool)
{
	rlp_pool_exit(pool);
	if (pool->va)
		memunmap(pool->va);
	kfree(pool);
}

static int pool_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct rlp_pool *pool = kzalloc(sizeof(*pool), GFP_KERNEL);
	int rc;

	if (!pool)
		return -ENOMEM;
	pool->pdev = pdev;
	pool->ops = rlp_ops;
	INIT_LIST_HEAD(&pool->devices);
	rc = pci_enable_device_mem(pdev);
	if (rc)
		goto free;
	rc = pci_request_region(pdev, IVSHMEM_BAR, RLP_NAME);
	if (rc)
		goto disable;
	rc = pool_map(pool);
	if (!rc)
		rc = rlp_pool_init(pool);
	if (rc)
		goto release;
	check_cache(pool);
	pci_set_drvdata(pdev, pool);
	rlp_stats_add(pool);
	pci_info(pdev, "pool of %zu MiB at %pa\n", pool->size >> 20, &pool->pa);
	mutex_lock(&rlp_lock);
	list_add_tail(&pool->entry, &all_pools);
	mutex_unlock(&rlp_lock);
	attach_bound();
	return 0;
release:
	pci_release_region(pdev, IVSHMEM_BAR);
disable:
	pci_disable_device(pdev);
free:
	pool_free(pool);
	return rc;
}

/* Returns a device of the pool, with a reference; NULL if it has none. */
static struct pci_dev *first_device(struct rlp_pool *pool)
{
	struct device_entry *device;
	struct pci_dev *pdev = NULL;

	mutex_lock(&rlp_lock);
	device = list_first_entry_or_null(&pool->devices, struct device_entry, entry);
	if (device)
		pdev = pci_dev_get(device->pdev);
	mutex_unlock(&rlp_lock);
	return pdev;
}

/* Removes a pool. Its devices lose their drivers: without a pool a backend would refuse them. */
static void pool_remove(struct pci_dev *pdev)
{
	struct rlp_pool *pool = pci_get_drvdata(pdev);
	struct pci_dev *device;

	mutex_lock(&rlp_lock);
	list_del(&pool->entry);
	mutex_unlock(&rlp_lock);
	while ((device = first_device(pool))) {
		device_for_each_child(&device->dev, NULL, release_driver);
		mutex_lock(&rlp_lock);
		detach_from(pool, device);
		mutex_unlock(&rlp_lock);
		pci_warn(device, "has lost its pool and its driver\n");
		pci_dev_put(device);
	}
	rlp_stats_remove(pool);
	pci_release_region(pdev, IVSHMEM_BAR);
	pci_disable_device(pdev);
	pool_free(pool);
}

static const struct pci_device_id pool_ids[] = {
	{ PCI_DEVICE(PCI_VENDOR_ID_REDHAT_QUMRANET, IVSHMEM_DEVICE) },
	{ 0 }
};
MODULE_DEVICE_TABLE(pci, pool_ids);

static struct pci_driver pool_driver = {
	.name = RLP_NAME,
	.id_table = pool_ids,
	.probe = pool_probe,
	.remove = pool_remove,
};

static int __init rlp_init(void)
{
	int rc;

	rlp_stats_init();
	rc = bus_register_notifier(&pci_bus_type, &pci_events);
	if (rc)
		goto stats;
	rc = pci_register_driver(&pool_driver);
	if (rc)
		goto events;
	mutex_lock(&rlp_lock);
	if (list_empty(&all_pools))
		pr_info(RLP_NAME ": no pool: none of the ivshmem devices has the mark\n");
	mutex_unlock(&rlp_lock);
	return 0;
events:
	bus_unregister_notifier(&pci_bus_type, &pci_events);
stats:
	rlp_stats_exit();
	return rc;
}

static void __exit rlp_exit(void)
{
	pci_unregister_driver(&pool_driver);
	bus_unregister_notifier(&pci_bus_type, &pci_events);
	rlp_stats_exit();
}

module_init(rlp_init);
module_exit(rlp_exit);
MODULE_DESCRIPTION("Pools of memory that virtio devices lend their backends");
MODULE_AUTHOR("Ringfence developers");
MODULE_LICENSE("GPL");
