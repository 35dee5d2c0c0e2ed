//! Complaints on the hypervisor's console: faults, and bad grants that a debug build names.

use std::path::Path;

/// Faults that a hypervisor reports on its console. A scenario that causes one on purpose names it in `# report:`.
const FAULTS: [&str; 8] = [
    "Assertion",
    "Xen call trace",
    "UBSAN",
    "Xen BUG",
    "FATAL",
    "Panic on CPU",
    "a page cannot be unmapped",
    "IOMMU does not flush",
];

/// Returns `true` if a line of the hypervisor's console reports a fault.
pub(crate) fn is_fault(line: &str) -> bool {
    FAULTS.iter().any(|fault| line.contains(fault))
}

/// Returns the faults and the bad grants that a debug build of the hypervisor has logged after the first `read` bytes of
/// its console.
pub(crate) fn complaints(console: &Path, read: &mut usize) -> Vec<String> {
    let text = std::fs::read(console).unwrap_or_default();
    let new = String::from_utf8_lossy(text.get(*read..).unwrap_or_default()).into_owned();
    *read = text.len();
    // Messages about a growing table, and about what a destroyed domain had mapped, are no complaints.
    let usual = ["Expanding", "Grant release"];
    let complaints = new.lines().filter(|line| {
        let grant = line.contains("grant_table.c") && !usual.iter().any(|text| line.contains(text));
        line.contains("(XEN)") && (grant || is_fault(line))
    });
    complaints.map(|line| line.trim().to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaint_of_hypervisor_is_read_once() {
        let folder = tempfile::tempdir().unwrap();
        let console = folder.path().join("console.log");
        let complaint = "(XEN) common/grant_table.c:2700:d0v0 Bad grant reference 0x7\r\n";
        let fault = "(XEN) Assertion '!w->issued' failed at common/grant_window.c:120\r\n";
        let left =
            "(XEN) common/grant_table.c:3824:d0v0 Grant release 0x7 ref 0x208 flags 0x2 d3\r\n";
        std::fs::write(&console, format!("up\n{complaint}{left}{fault}")).unwrap();
        let mut read = 0;
        assert_eq!(complaints(&console, &mut read), [complaint.trim(), fault.trim()]);
        assert_eq!(complaints(&console, &mut read), [] as [&str; 0]);
        assert!(is_fault(fault) && !is_fault(complaint));
    }
}
