//! Command line of `ringfence-bench grant`.

use clap::Args;

const NOTES: &str = "\
Each figure is the median of several rounds, in nanoseconds of the thread's processor time for each
page, and in system calls for each page. `cpus 2`: another thread of the same process is busy on a
second core, which the removal of a page from a mapping must then interrupt.

`window` is the engine `arena`: a page is issued and revoked by stores to shared memory. The rest of
the cost of a revocation is due when the page is used again (`fresh again`), and at once for a
forced one. `grants` are ordinary grants: `lend` and `take back` by the granter, `map`, `unmap` and
`copy` by the grantee for each I/O.

`iotlb` is the table by which kernel vhost-net translates (if /dev/vhost-net is available), `vfio`
or `iommufd` that of the machine's IOMMU (with --vfio; iommufd is used where it exists). A device
uses the pages, and each issue and each revocation is a system call.";

/// Cost of each operation on a grant: windows beside ordinary grants
#[derive(Debug, Args)]
#[command(after_help = NOTES)]
pub struct GrantArgs {
    /// Cores in use: 1, 2 or both
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,2",
          value_parser = clap::value_parser!(u32).range(1..=2))]
    pub cpus: Vec<u32>,

    /// Rounds of which the median is taken
    #[arg(long, value_name = "N", default_value = "9",
          value_parser = clap::value_parser!(u32).range(1..=1001))]
    pub rounds: u32,

    /// Times that the peer maps the whole window, in rows where it maps it often
    #[arg(long, value_name = "N", default_value = "1000",
          value_parser = clap::value_parser!(u32).range(1..=10000))]
    pub mappings: u32,

    /// PCI device bound to vfio-pci (0000:00:03.0), for the rows of the engine vfio or iommufd
    #[arg(long, value_name = "DEVICE")]
    pub vfio: Option<String>,

    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}
