//! Engines of translation tables for IOMMUs: VFIO containers and iommufd.
//!
//! No product path uses these engines. The program `engines` tries them on devices of emulated machines, and
//! `ringfence-bench grant --vfio` measures them. The trait that they implement is
//! [`AddressSpace`](ringfence_access::iommu::AddressSpace).

pub mod vfio;
