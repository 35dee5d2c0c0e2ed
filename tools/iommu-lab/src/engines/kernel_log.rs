//! Kernel log reader: reports of accesses that the IOMMU refused.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::Context as _;

/// Kernel log from the moment of opening.
pub(crate) struct KernelLog(File);

impl KernelLog {
    /// Opens the log and skips its present records.
    pub(crate) fn open() -> anyhow::Result<KernelLog> {
        let nonblock = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits())?;
        let mut options = File::options();
        let mut file =
            options.read(true).custom_flags(nonblock).open("/dev/kmsg").context("/dev/kmsg")?;
        file.seek(SeekFrom::End(0)).context("the end of the kernel's log")?;
        Ok(KernelLog(file))
    }

    /// Returns the addresses of the accesses refused since the last call, in order.
    pub(crate) fn faults(&mut self) -> anyhow::Result<Vec<u64>> {
        let mut found = Vec::new();
        let mut record = vec![0; 8192];
        loop {
            let text = match self.0.read(&mut record) {
                Ok(len) => String::from_utf8_lossy(&record[..len]).into_owned(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(found),
                // Records were overwritten before this process read them.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => continue,
                Err(error) => return Err(error).context("the kernel's log"),
            };
            found.extend(fault(&text));
        }
    }
}

/// Parses the address in a line like `DMAR: [DMA Write NO_PASID] Request device [00:02.0] fault addr 0x40009000 …`.
fn fault(text: &str) -> Option<u64> {
    let (_, rest) = text.split_once("DMAR: [DMA ")?;
    let (_, rest) = rest.split_once("fault addr 0x")?;
    let digits = rest.split(|c: char| !c.is_ascii_hexdigit()).next()?;
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn fault_address_parses_from_kernel_line() {
        let line = "3,512,9000,-;DMAR: [DMA Write NO_PASID] Request device [00:02.0] fault addr 0x40009000 [fault reason 0x05] PTE Write access is not set\n";
        assert_eq!(super::fault(line), Some(0x4000_9000));
        assert_eq!(super::fault("3,513,9000,-;DMAR: DRHD: handling fault status reg 2\n"), None);
    }
}
