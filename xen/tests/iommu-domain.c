// SPDX-License-Identifier: GPL-2.0-only
/*
 * Preloaded into xl: PVH domains that it creates have an IOMMU context. libxl
 * refuses `passthrough=` for them, but the hypervisor does not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>

/* Head of struct xen_domctl_createdomain. */
struct config {
	uint32_t ssidref;
	uint8_t handle[16];
	uint32_t flags;
	uint32_t iommu_opts;
};

int xc_domain_create(void *xch, uint32_t *domid, struct config *config)
{
	int (*create)(void *, uint32_t *, struct config *) =
		dlsym(RTLD_NEXT, "xc_domain_create");

	config->flags |= 1u << 5;	/* XEN_DOMCTL_CDF_iommu */
	return create(xch, domid, config);
}
