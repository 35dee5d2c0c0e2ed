// SPDX-License-Identifier: GPL-2.0-only
/*
 * The grantee's end: a pool of guest frames without memory but with struct pages, so that pages of
 * a window can be pinned (O_DIRECT, io_uring, vmsplice). A window takes a range of the pool. A
 * range whose pages the kernel still has pinned when its window is closed is not used again before
 * they are released: else an old transfer would reach the pages of another granter.
 */
#include <linux/bitmap.h>
#include <linux/ioport.h>
#include <linux/memremap.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <linux/vmalloc.h>
#include <xen/interface/xen.h>
#include <xen/interface/grant_table.h>
#include <xen/page.h>
#include <asm/xen/hypercall.h>
#include "window.h"

static unsigned int frames = 32768;
module_param(frames, uint, 0444);
MODULE_PARM_DESC(frames,
		 "frames that all windows of this grantee share; 0: no grantee (default 32768)");

static unsigned long base;
module_param(base, ulong, 0444);
MODULE_PARM_DESC(base, "set by the module: the first of these frames");

static struct resource range = {
	.name = "grant windows",
	.flags = IORESOURCE_MEM | IORESOURCE_BUSY,
};

static struct dev_pagemap pagemap;
/* Bitmaps of frames: in a window or closed with pages pinned; of a closed window, to be checked. */
static unsigned long *used;
static unsigned long *closed;
static DEFINE_MUTEX(pool_lock);

int pool_init(void)
{
	unsigned long align = PAGES_PER_SECTION * PAGE_SIZE;
	void *va;
	int rc;

	if (!frames)
		return 0;
	frames = ALIGN(frames, PAGES_PER_SECTION);
	used = bitmap_zalloc(frames, GFP_KERNEL);
	closed = bitmap_zalloc(frames, GFP_KERNEL);
	rc = -ENOMEM;
	if (!used || !closed)
		goto no_bitmap;
	rc = allocate_resource(&iomem_resource, &range, (resource_size_t)frames << PAGE_SHIFT, 0,
			       -1, align, NULL, NULL);
	if (rc)
		goto no_bitmap;
	pagemap.type = MEMORY_DEVICE_GENERIC;
	pagemap.range.start = range.start;
	pagemap.range.end = range.end;
	pagemap.nr_range = 1;
	pagemap.owner = &pagemap;
	va = memremap_pages(&pagemap, NUMA_NO_NODE);
	base = PFN_DOWN(range.start);
	if (!IS_ERR(va))
		return 0;
	rc = PTR_ERR(va);
	release_resource(&range);
no_bitmap:
	bitmap_free(used);
	bitmap_free(closed);
	return rc;
}

void pool_exit(void)
{
	if (!frames)
		return;
	memunmap_pages(&pagemap);
	release_resource(&range);
	bitmap_free(used);
	bitmap_free(closed);
}

static struct page *frame_page(unsigned long index)
{
	return pfn_to_page(PFN_DOWN(range.start) + index);
}

/*
 * Takes back the frames of closed windows that nobody has pinned any more. The pool's own reference
 * is 1.
 */
static void reclaim(void)
{
	unsigned long i;

	for_each_set_bit(i, closed, frames)
		if (page_ref_count(frame_page(i)) == 1) {
			__clear_bit(i, closed);
			__clear_bit(i, used);
		}
}

static long take_range(struct window *w)
{
	long rc = -ENOSPC;

	if (!frames)
		return rc;
	mutex_lock(&pool_lock);
	reclaim();
	w->first = bitmap_find_next_zero_area(used, frames, 0, w->nr, 0);
	if (w->first + w->nr <= frames) {
		bitmap_set(used, w->first, w->nr);
		rc = 0;
	}
	mutex_unlock(&pool_lock);
	return rc;
}

static void give_range(struct window *w)
{
	mutex_lock(&pool_lock);
	bitmap_set(closed, w->first, w->nr);
	reclaim();
	mutex_unlock(&pool_lock);
}

static long register_window(struct window *w)
{
	struct gnttab_window_register op = {
		.granter = w->peer,
		.handle = w->handle,
		.nr_entries = w->nr,
		.base_gfn = PFN_DOWN(range.start) + w->first,
	};
	u64 *gfns = kmalloc_array(w->table_pages, sizeof(*gfns), GFP_KERNEL);
	u32 i;
	int rc;

	if (!gfns)
		return -ENOMEM;
	for (i = 0; i < w->table_pages; i++)
		gfns[i] = xen_page_to_gfn(vmalloc_to_page(w->table + i * PAGE_SIZE));
	op.table_gfns = (unsigned long)gfns;
	rc = HYPERVISOR_grant_table_op(GNTTABOP_window_register, &op, 1);
	kfree(gfns);
	if (rc || !op.status)
		return rc;
	switch (op.status) {
	case GNTST_permission_denied:
		return -EACCES;
	case GNTST_no_space:
		return -ENOSPC;
	case GNTST_eagain:
		return -EAGAIN;
	case GNTST_bad_virt_addr:
		return -EBUSY;
	case GNTST_general_error:
		return -EOPNOTSUPP;
	default:
		return -ENXIO;
	}
}

long grantee_register(struct window *w, void __user *arg)
{
	struct rfwin_register r;
	long rc;

	if (copy_from_user(&r, arg, sizeof(r)))
		return -EFAULT;
	if (r.pad || !r.nr_entries || r.nr_entries > frames)
		return -EINVAL;
	w->peer = r.granter;
	w->handle = r.handle;
	w->nr = r.nr_entries;
	w->table_pages = DIV_ROUND_UP(w->nr * sizeof(struct gnttab_window_slot), PAGE_SIZE);
	rc = take_range(w);
	if (rc)
		return rc;
	w->table = vmalloc_user(w->table_pages * PAGE_SIZE);
	rc = w->table ? register_window(w) : -ENOMEM;
	if (rc) {
		give_range(w);
		vfree(w->table);
		w->table = NULL;
		return rc;
	}
	/* Pairs with window_mmap(): range and table are there before the role. */
	smp_store_release(&w->role, GRANTEE);
	r.table_pages = w->table_pages;
	/* A caller that cannot be told closes the file. */
	return copy_to_user(arg, &r, sizeof(r)) ? -EFAULT : 0;
}

static void restrict_flags(struct vm_area_struct *vma)
{
	/* Not inherited by children, not dumped, never run. */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 3, 0)
	vm_flags_mod(vma, VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP, VM_MAYEXEC);
#else
	vma->vm_flags |= VM_DONTCOPY | VM_DONTEXPAND | VM_DONTDUMP;
	vma->vm_flags &= ~VM_MAYEXEC;
#endif
}

int grantee_mmap(struct window *w, struct vm_area_struct *vma)
{
	unsigned long n = vma_pages(vma), first = vma->vm_pgoff, i;

	if (!(vma->vm_flags & VM_SHARED) || (vma->vm_flags & VM_EXEC))
		return -EINVAL;
	restrict_flags(vma);
	if (first < PFN_DOWN(RFWIN_PAGES_OFFSET))
		return first + n <= w->table_pages ? remap_vmalloc_range(vma, w->table, first) :
						     -EINVAL;
	first -= PFN_DOWN(RFWIN_PAGES_OFFSET);
	if (first > w->nr || n > w->nr - first)
		return -EINVAL;
	for (i = 0; i < n; i++) {
		int rc = vm_insert_page(vma, vma->vm_start + i * PAGE_SIZE,
					frame_page(w->first + first + i));

		if (rc)
			return rc;
	}
	return 0;
}

void grantee_release(struct window *w)
{
	/* A range and a table that the hypervisor may still use are lost. */
	if (WARN_ON_ONCE(!destroy_window(w)))
		return;
	give_range(w);
	vfree(w->table);
}
