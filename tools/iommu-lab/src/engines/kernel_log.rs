//! What the kernel says of accesses that its IOMMU refused.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::Context as _;

/// The kernel's log, from when it was opened on.
pub(crate) struct KernelLog(File);

impl KernelLog {
    /// Passes over what is there.
    pub(crate) fn open() -> anyhow::Result<KernelLog> {
        let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits())?;
        let mut options = File::options();
        let mut file =
            options.read(true).custom_flags(nonblock).open("/dev/kmsg").context("/dev/kmsg")?;
        file.seek(SeekFrom::End(0)).context("the end of the kernel's log")?;
        Ok(KernelLog(file))
    }

    /// The addresses of accesses that were refused since, in order.
    pub(crate) fn faults(&mut self) -> anyhow::Result<Vec<u64>> {
        let mut found = Vec::new();
        let mut record = vec![0; 8192];
        loop {
            let text = match self.0.read(&mut record) {
                Ok(len) => String::from_utf8_lossy(&record[..len]).into_owned(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(found),
                // Records were overwritten before they were read.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => continue,
                Err(error) => return Err(error).context("the kernel's log"),
            };
            found.extend(fault(&text));
        }
    }
}

/// The address in a line like `DMAR: [DMA Write NO_PASID] Request device [00:02.0] fault addr 0x40009000 …`.
fn fault(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("DMAR: [DMA ")?;
    let (_, rest) = rest.split_once("fault addr 0x")?;
    let digits = rest.split(|c: char| !c.is_ascii_hexdigit()).next()?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_address_is_read_from_a_line_of_the_kernel() {
        let line = "3,512,9000,-;DMAR: [DMA Write NO_PASID] Request device [00:02.0] fault addr 0x40009000 [fault reason 0x05] PTE Write access is not set\n";
        assert_eq!(super::fault(line), Some(0x4000_9000));
        assert_eq!(super::fault("3,513,9000,-;DMAR: DRHD: handling fault status reg 2\n"), None);
    }
}
