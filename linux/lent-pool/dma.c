// SPDX-License-Identifier: GPL-2.0-only
/*
 * DMA operations of the devices of a pool. A streaming mapping is a slot: data for the device are
 * copied into it when they are mapped, and data of the device out of it when they are unmapped.
 * Nothing is copied in for a buffer that the device writes: it would lend what lay there before.
 */
#include <linux/io.h>
#include <linux/scatterlist.h>
#include <linux/version.h>
#include "lent-pool.h"

static struct rlp_pool *pool_of(struct device *dev)
{
	return container_of(get_dma_ops(dev), struct rlp_pool, ops);
}

static void copy(struct rlp_pool *pool, const struct rlp_slot *slot, dma_addr_t addr, size_t offset,
		 size_t len, bool to_device)
{
	void *memory = phys_to_virt(slot->phys + offset);

	/* A part of a mapping may be synchronised, and no more. */
	len = min_t(size_t, len, slot->len - offset);
	if (to_device) {
		memcpy(rlp_va(pool, addr), memory, len);
		rlp_add(pool, RLP_BYTES_TO, len);
	} else {
		memcpy(memory, rlp_va(pool, addr), len);
		rlp_add(pool, RLP_BYTES_FROM, len);
	}
}

static dma_addr_t map(struct device *dev, phys_addr_t phys, size_t len, enum dma_data_direction dir,
		      unsigned long attrs)
{
	enum rlp_way way = dir == DMA_FROM_DEVICE ? RLP_FROM_DEVICE : RLP_TO_DEVICE;
	struct rlp_pool *pool = pool_of(dev);
	struct rlp_slot *slot;
	dma_addr_t addr;
	size_t offset;

	if (!rlp_slot_take(pool, phys, len, way, &addr))
		return DMA_MAPPING_ERROR;
	rlp_add(pool, way == RLP_TO_DEVICE ? RLP_MAPS_TO : RLP_MAPS_FROM, 1);
	if (dir != DMA_FROM_DEVICE && !(attrs & DMA_ATTR_SKIP_CPU_SYNC)) {
		slot = rlp_slot_find(pool, addr, &offset);
		copy(pool, slot, addr, offset, len, true);
	}
	return addr;
}

static void unmap(struct device *dev, dma_addr_t addr, size_t len, enum dma_data_direction dir,
		  unsigned long attrs)
{
	struct rlp_pool *pool = pool_of(dev);
	struct rlp_slot *slot;
	size_t offset;

	slot = rlp_slot_find(pool, addr, &offset);
	if (WARN_ON_ONCE(!slot || offset)) {
		rlp_add(pool, RLP_BAD_UNMAP, 1);
		return;
	}
	if (dir != DMA_TO_DEVICE && !(attrs & DMA_ATTR_SKIP_CPU_SYNC))
		copy(pool, slot, addr, 0, len, false);
	rlp_slot_free(pool, addr);
}

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
static dma_addr_t rlp_map_phys(struct device *dev, phys_addr_t phys, size_t len,
			       enum dma_data_direction dir, unsigned long attrs)
{
	/* Registers of another device are no memory that can be copied. */
	if (attrs & DMA_ATTR_MMIO)
		return DMA_MAPPING_ERROR;
	return map(dev, phys, len, dir, attrs);
}
#else
static dma_addr_t rlp_map_page(struct device *dev, struct page *page, unsigned long offset,
			       size_t len, enum dma_data_direction dir, unsigned long attrs)
{
	return map(dev, page_to_phys(page) + offset, len, dir, attrs);
}
#endif

static void rlp_unmap_sg(struct device *dev, struct scatterlist *list, int entries,
			 enum dma_data_direction dir, unsigned long attrs)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, entries, i)
		unmap(dev, sg_dma_address(sg), sg_dma_len(sg), dir, attrs);
}

static int rlp_map_sg(struct device *dev, struct scatterlist *list, int entries,
		      enum dma_data_direction dir, unsigned long attrs)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, entries, i) {
		dma_addr_t addr = map(dev, sg_phys(sg), sg->length, dir, attrs);

		if (addr == DMA_MAPPING_ERROR) {
			rlp_unmap_sg(dev, list, i, dir, attrs | DMA_ATTR_SKIP_CPU_SYNC);
			return -ENOMEM;
		}
		sg_dma_address(sg) = addr;
		sg_dma_len(sg) = sg->length;
	}
	return entries;
}

/* Copies a part of a mapping, after the device or before it. */
static void synchronise(struct device *dev, dma_addr_t addr, size_t len, bool to_device)
{
	struct rlp_pool *pool = pool_of(dev);
	struct rlp_slot *slot;
	size_t offset;

	slot = rlp_slot_find(pool, addr, &offset);
	if (slot)
		copy(pool, slot, addr, offset, len, to_device);
}

static void rlp_sync_for_cpu(struct device *dev, dma_addr_t addr, size_t len,
			     enum dma_data_direction dir)
{
	if (dir != DMA_TO_DEVICE)
		synchronise(dev, addr, len, false);
}

static void rlp_sync_for_device(struct device *dev, dma_addr_t addr, size_t len,
				enum dma_data_direction dir)
{
	if (dir != DMA_FROM_DEVICE)
		synchronise(dev, addr, len, true);
}

static void rlp_sync_sg_for_cpu(struct device *dev, struct scatterlist *list, int entries,
				enum dma_data_direction dir)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, entries, i)
		rlp_sync_for_cpu(dev, sg_dma_address(sg), sg_dma_len(sg), dir);
}

static void rlp_sync_sg_for_device(struct device *dev, struct scatterlist *list, int entries,
				   enum dma_data_direction dir)
{
	struct scatterlist *sg;
	int i;

	for_each_sg(list, sg, entries, i)
		rlp_sync_for_device(dev, sg_dma_address(sg), sg_dma_len(sg), dir);
}

static void *rlp_alloc(struct device *dev, size_t len, dma_addr_t *addr, gfp_t gfp,
		       unsigned long attrs)
{
	return rlp_coherent_alloc(pool_of(dev), len, addr);
}

static void rlp_free(struct device *dev, size_t len, void *va, dma_addr_t addr, unsigned long attrs)
{
	rlp_coherent_free(pool_of(dev), va, len);
}

static int rlp_supported(struct device *dev, u64 mask)
{
	struct rlp_pool *pool = pool_of(dev);

	return pool->pa + pool->size - 1 <= mask;
}

static u64 rlp_required_mask(struct device *dev)
{
	struct rlp_pool *pool = pool_of(dev);

	return DMA_BIT_MASK(fls64(pool->pa + pool->size - 1));
}

static size_t rlp_max_mapping_size(struct device *dev)
{
	return RLP_SLOT_MAX;
}

/* Each pool has a copy, by which its operations find it. */
const struct dma_map_ops rlp_ops = {
	.alloc = rlp_alloc,
	.free = rlp_free,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 18, 0)
	.map_phys = rlp_map_phys,
	.unmap_phys = unmap,
#else
	.map_page = rlp_map_page,
	.unmap_page = unmap,
#endif
	.map_sg = rlp_map_sg,
	.unmap_sg = rlp_unmap_sg,
	.sync_single_for_cpu = rlp_sync_for_cpu,
	.sync_single_for_device = rlp_sync_for_device,
	.sync_sg_for_cpu = rlp_sync_sg_for_cpu,
	.sync_sg_for_device = rlp_sync_sg_for_device,
	.dma_supported = rlp_supported,
	.get_required_mask = rlp_required_mask,
	.max_mapping_size = rlp_max_mapping_size,
};
