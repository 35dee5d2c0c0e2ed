/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Lent pools: memory by which virtio devices exchange data with their backends, in place of the
 * machine's own memory.
 *
 *   main.c   pools (PCI functions with a mark), devices (virtio functions), binding, module
 *   pool.c   memory of a pool: slots and coherent memory
 *   dma.c    DMA operations: a mapping is a slot, and its data are copied
 *   stats.c  counters in debugfs
 *
 * Locks, outermost first: rlp_lock (list of pools, their devices), rlp_class.lock (free slots). The
 * driver core's device locks are outside of rlp_lock.
 *
 * A backend can read and write all of the pool at any time. Nothing that this module relies on lies
 * there: the tables of slots are in the machine's own memory.
 */
#ifndef RINGFENCE_LENT_POOL_H
#define RINGFENCE_LENT_POOL_H

#include <linux/dma-map-ops.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/percpu.h>
#include <linux/spinlock.h>
#include <linux/types.h>

struct dentry;
struct gen_pool;

#define RLP_NAME "ringfence-lent-pool"

/* First bytes of a pool. */
#define RLP_MARK "ringfence-pool 1"
#define RLP_MARK_LEN (sizeof(RLP_MARK) - 1)

/* Part of a pool in front of its slots: the page of the mark. */
#define RLP_HEAD (64UL << 10)
/* A block request of 254 pages has room in three quarters of a class. */
#define RLP_SIZE_MIN (16UL << 20)

/* Classes of slots: 2 KiB for packets, 4 KiB for pages, 64 KiB for blocks and super-packets. */
#define RLP_CLASSES 3
#define RLP_SLOT_MAX (64UL << 10)

/* Way of a mapping. Each may use three quarters of a class, so neither starves the other. */
enum rlp_way {
	RLP_TO_DEVICE,
	RLP_FROM_DEVICE,
	RLP_WAYS,
};

enum rlp_counter {
	RLP_MAPS_TO,
	RLP_MAPS_FROM,
	RLP_BYTES_TO,
	RLP_BYTES_FROM,
	RLP_FULL_TO,
	RLP_FULL_FROM,
	RLP_TOO_LONG,
	RLP_BAD_UNMAP,
	RLP_COHERENT,
	RLP_ZEROED,
	RLP_COUNTERS,
};

struct rlp_counters {
	u64 count[RLP_COUNTERS];
};

/* Mapping that a slot holds. */
struct rlp_slot {
	/* Place of the data in the machine's memory. */
	phys_addr_t phys;
	/* Length in bytes, 0 for a free slot. */
	u32 len;
	u8 way;
};

struct rlp_class {
	/* Guards free, top and busy. */
	spinlock_t lock;
	unsigned int shift;
	/* Place of the first slot in the pool. */
	size_t offset;
	u32 slots;
	/* Stack of free slots: the last one freed is used first, and is still in the cache. */
	u32 *free;
	u32 top;
	u32 busy[RLP_WAYS];
	struct rlp_slot *slot;
};

struct rlp_pool {
	struct list_head entry;
	/* Operations of the devices of this pool. */
	struct dma_map_ops ops;
	struct pci_dev *pdev;
	void *va;
	phys_addr_t pa;
	size_t size;
	struct rlp_class class[RLP_CLASSES];
	struct gen_pool *coherent;
	size_t coherent_offset;
	struct rlp_counters __percpu *counters;
	struct dentry *file;
	/* Devices of the pool, and their number: under rlp_lock. */
	struct list_head devices;
	unsigned int users;
	/* Freed slots are zeroed: several devices use them. */
	bool zeroes;
};

static inline void rlp_add(struct rlp_pool *pool, enum rlp_counter counter, u64 value)
{
	this_cpu_add(pool->counters->count[counter], value);
}

/* pool.c */
int rlp_pool_init(struct rlp_pool *pool);
void rlp_pool_exit(struct rlp_pool *pool);
bool rlp_slot_take(struct rlp_pool *pool, phys_addr_t phys, size_t len, enum rlp_way way,
		   dma_addr_t *addr);
struct rlp_slot *rlp_slot_find(struct rlp_pool *pool, dma_addr_t addr, size_t *offset);
void rlp_slot_free(struct rlp_pool *pool, dma_addr_t addr);
void rlp_pool_scrub(struct rlp_pool *pool);
void *rlp_coherent_alloc(struct rlp_pool *pool, size_t len, dma_addr_t *addr);
void rlp_coherent_free(struct rlp_pool *pool, void *va, size_t len);

static inline void *rlp_va(struct rlp_pool *pool, dma_addr_t addr)
{
	return pool->va + (addr - pool->pa);
}

/* dma.c */
extern const struct dma_map_ops rlp_ops;

/* stats.c */
void rlp_stats_init(void);
void rlp_stats_exit(void);
void rlp_stats_add(struct rlp_pool *pool);
void rlp_stats_remove(struct rlp_pool *pool);

#endif
