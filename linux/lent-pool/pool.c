// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory of a pool.
 *
 *   0          mark
 *   64 KiB     coherent memory: rings, an eighth of the pool
 *   then       a quarter in slots of 2 KiB, an eighth of 4 KiB, the rest of 64 KiB
 *
 * A mapping takes a slot of the smallest class that has room. Taking and freeing are a pop and a
 * push of a stack.
 */
#include <linux/genalloc.h>
#include <linux/mm.h>
#include <linux/slab.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/vmalloc.h>
#include "lent-pool.h"

static const unsigned int shifts[RLP_CLASSES] = { 11, 12, 16 };

static int class_init(struct rlp_class *class, unsigned int shift, size_t offset, size_t bytes)
{
	u32 i;

	spin_lock_init(&class->lock);
	class->shift = shift;
	class->offset = offset;
	class->slots = bytes >> shift;
	class->free = vmalloc(array_size(class->slots, sizeof(*class->free)));
	class->slot = vzalloc(array_size(class->slots, sizeof(*class->slot)));
	if (!class->free || !class->slot)
		return -ENOMEM;
	for (i = class->slots; i > 0; i--)
		class->free[class->top++] = i - 1;
	return 0;
}

/* Lays out a mapped pool. The caller calls rlp_pool_exit() also after a failure. */
int rlp_pool_init(struct rlp_pool *pool)
{
	size_t eighth = round_down((pool->size - RLP_HEAD) / 8, RLP_SLOT_MAX);
	size_t offset = RLP_HEAD, bytes[RLP_CLASSES];
	int i, rc;

	pool->counters = alloc_percpu(struct rlp_counters);
	pool->coherent = gen_pool_create(PAGE_SHIFT, NUMA_NO_NODE);
	if (!pool->counters || !pool->coherent)
		return -ENOMEM;
	pool->coherent_offset = offset;
	rc = gen_pool_add(pool->coherent, (unsigned long)pool->va + offset, eighth, NUMA_NO_NODE);
	if (rc)
		return rc;
	/* Memory is aligned to its size, as drivers expect of coherent memory. */
	gen_pool_set_algo(pool->coherent, gen_pool_first_fit_order_align, NULL);
	offset += eighth;
	bytes[0] = 2 * eighth;
	bytes[1] = eighth;
	bytes[2] = round_down(pool->size - offset - 3 * eighth, RLP_SLOT_MAX);
	for (i = 0; i < RLP_CLASSES; i++) {
		rc = class_init(&pool->class[i], shifts[i], offset, bytes[i]);
		if (rc)
			return rc;
		offset += bytes[i];
	}
	return 0;
}

void rlp_pool_exit(struct rlp_pool *pool)
{
	int i;

	for (i = 0; i < RLP_CLASSES; i++) {
		vfree(pool->class[i].free);
		vfree(pool->class[i].slot);
	}
	/* Memory that a driver has not freed stays in the list. */
	if (pool->coherent &&
	    !WARN_ON(gen_pool_avail(pool->coherent) != gen_pool_size(pool->coherent)))
		gen_pool_destroy(pool->coherent);
	free_percpu(pool->counters);
}

/* Pops a free slot of a class for a way. */
static bool class_pop(struct rlp_class *class, enum rlp_way way, u32 *number)
{
	u32 limit = class->slots - class->slots / 4;
	unsigned long flags;
	bool found;

	spin_lock_irqsave(&class->lock, flags);
	found = class->top && class->busy[way] < limit;
	if (found) {
		*number = class->free[--class->top];
		class->busy[way]++;
	}
	spin_unlock_irqrestore(&class->lock, flags);
	return found;
}

/* Takes a slot for a mapping, and sets its address. The slot holds bytes of an earlier mapping. */
bool rlp_slot_take(struct rlp_pool *pool, phys_addr_t phys, size_t len, enum rlp_way way,
		   dma_addr_t *addr)
{
	u32 number;
	int i;

	if (!len || len > RLP_SLOT_MAX) {
		rlp_add(pool, RLP_TOO_LONG, 1);
		return false;
	}
	for (i = 0; i < RLP_CLASSES; i++) {
		struct rlp_class *class = &pool->class[i];

		if (len > 1UL << class->shift || !class_pop(class, way, &number))
			continue;
		class->slot[number] = (struct rlp_slot){ .phys = phys, .len = len, .way = way };
		*addr = pool->pa + class->offset + ((size_t)number << class->shift);
		return true;
	}
	rlp_add(pool, way == RLP_TO_DEVICE ? RLP_FULL_TO : RLP_FULL_FROM, 1);
	return false;
}

static struct rlp_class *class_of(struct rlp_pool *pool, dma_addr_t addr, u32 *number)
{
	int i;

	for (i = 0; i < RLP_CLASSES; i++) {
		struct rlp_class *class = &pool->class[i];
		/* An address in front of the class wraps, and is beyond it. */
		size_t offset = (size_t)(addr - pool->pa) - class->offset;

		if (offset >> class->shift < class->slots) {
			*number = offset >> class->shift;
			return class;
		}
	}
	return NULL;
}

/* Returns the mapping at an address, and the offset in it; NULL if there is none. */
struct rlp_slot *rlp_slot_find(struct rlp_pool *pool, dma_addr_t addr, size_t *offset)
{
	struct rlp_class *class;
	u32 number;

	class = class_of(pool, addr, &number);
	if (!class || !class->slot[number].len)
		return NULL;
	*offset = ((size_t)(addr - pool->pa) - class->offset) & ((1UL << class->shift) - 1);
	return *offset < class->slot[number].len ? &class->slot[number] : NULL;
}

/* Frees the slot of a mapping that rlp_slot_find() has found. */
void rlp_slot_free(struct rlp_pool *pool, dma_addr_t addr)
{
	struct rlp_class *class;
	struct rlp_slot *slot;
	unsigned long flags;
	u32 number;

	class = class_of(pool, addr, &number);
	slot = &class->slot[number];
	if (READ_ONCE(pool->zeroes)) {
		memset(rlp_va(pool, addr), 0, slot->len);
		rlp_add(pool, RLP_ZEROED, slot->len);
	}
	slot->len = 0;
	spin_lock_irqsave(&class->lock, flags);
	class->busy[slot->way]--;
	class->free[class->top++] = number;
	spin_unlock_irqrestore(&class->lock, flags);
}

/*
 * Zeroes the free slots. A slot that is taken and freed meanwhile is zeroed where pool->zeroes is
 * set; otherwise the pool has no device yet.
 */
void rlp_pool_scrub(struct rlp_pool *pool)
{
	unsigned long flags;
	u32 place;
	int i;

	for (i = 0; i < RLP_CLASSES; i++) {
		struct rlp_class *class = &pool->class[i];

		for (place = 0; place < class->slots; place++) {
			spin_lock_irqsave(&class->lock, flags);
			if (place < class->top)
				memset(pool->va + class->offset +
				       ((size_t)class->free[place] << class->shift),
				       0, 1UL << class->shift);
			spin_unlock_irqrestore(&class->lock, flags);
			cond_resched();
		}
	}
}

/* Allocates zeroed memory that the device and the machine use at the same time. */
void *rlp_coherent_alloc(struct rlp_pool *pool, size_t len, dma_addr_t *addr)
{
	unsigned long va = gen_pool_alloc(pool->coherent, PAGE_ALIGN(len));

	if (!va)
		return NULL;
	memset((void *)va, 0, PAGE_ALIGN(len));
	*addr = pool->pa + ((void *)va - pool->va);
	rlp_add(pool, RLP_COHERENT, PAGE_ALIGN(len));
	return (void *)va;
}

void rlp_coherent_free(struct rlp_pool *pool, void *va, size_t len)
{
	memset(va, 0, PAGE_ALIGN(len));
	gen_pool_free(pool->coherent, (unsigned long)va, PAGE_ALIGN(len));
	rlp_add(pool, RLP_COHERENT, -(u64)PAGE_ALIGN(len));
}
