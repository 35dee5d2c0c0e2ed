//! Signatures of disk image formats and of encrypted volumes.
//!
//! Storage here serves the bytes of a file as they are. A file of another format holds a disk inside a
//! structure of its own, which the first write of a guest would destroy. [`Format::of`] recognises such a
//! file by its first bytes, and a VHD of fixed size by its footer.
//!
//! Only regular files are examined. A guest may keep a LUKS or LVM volume on a block device, and nothing
//! distinguishes it from a volume of the host.
//!
//! Sources: the specifications of qcow2 and QED in QEMU, VHD and VHDX (Microsoft), VMDK 5.0 (VMware),
//! `VDICore.h` (VirtualBox), and LUKS1 and LUKS2 (cryptsetup).

use core::fmt;

/// Length in bytes of the part at either end of a file that holds all known signatures.
pub(super) const EXAMINED: usize = 512;

/// Format of a disk image that is not raw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Format {
    /// qcow and qcow2 of QEMU.
    Qcow,
    Qed,
    /// VHD of Virtual PC, Hyper-V and XenServer.
    Vhd,
    /// VHDX of Hyper-V.
    Vhdx,
    Vmdk,
    Vdi,
    Luks,
}

/// Signatures: offset, bytes, format.
const SIGNATURES: [(usize, &[u8], Format); 9] = [
    (0, b"QFI\xfb", Format::Qcow),
    (0, b"QED\0", Format::Qed),
    (0, VHD_COOKIE, Format::Vhd),
    (0, b"vhdxfile", Format::Vhdx),
    (0, b"KDMV", Format::Vmdk),
    (0, b"COWD", Format::Vmdk),
    (0, b"# Disk DescriptorFile", Format::Vmdk),
    (0, b"LUKS\xba\xbe", Format::Luks),
    (64, b"\x7f\x10\xda\xbe", Format::Vdi),
];

/// Begin of the footer of a VHD, and of its copy at the start.
const VHD_COOKIE: &[u8] = b"conectix";

/// Lengths of the footer of a VHD; those written before 2004 have 511 bytes.
const VHD_FOOTERS: [usize; 2] = [512, 511];

impl Format {
    /// Returns the format of a file with these first and last bytes, or `None` if no signature is known.
    #[must_use]
    pub fn of(head: &[u8], tail: &[u8]) -> Option<Format> {
        let at_start = |(offset, bytes, format): &(usize, &[u8], Format)| {
            head.get(*offset..)?.starts_with(bytes).then_some(*format)
        };
        let footer = |len: &usize| {
            let footer = tail.len().checked_sub(*len).and_then(|start| tail.get(start..));
            footer.is_some_and(|footer| footer.starts_with(VHD_COOKIE))
        };
        let found = SIGNATURES.iter().find_map(at_start);
        found.or_else(|| VHD_FOOTERS.iter().any(footer).then_some(Format::Vhd))
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Qcow => "a qcow2 image",
            Format::Qed => "a QED image",
            Format::Vhd => "a VHD image",
            Format::Vhdx => "a VHDX image",
            Format::Vmdk => "a VMDK image",
            Format::Vdi => "a VDI image",
            Format::Luks => "a LUKS volume",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(offset: usize, bytes: &[u8]) -> Vec<u8> {
        let mut block = vec![0; EXAMINED];
        block[offset..offset + bytes.len()].copy_from_slice(bytes);
        block
    }

    #[test]
    fn signature_at_its_offset_names_its_format() {
        let tail = vec![0; EXAMINED];
        for (offset, bytes, format) in SIGNATURES {
            assert_eq!(Format::of(&at(offset, bytes), &tail), Some(format), "{format}");
            assert_eq!(Format::of(&at(offset + 1, bytes), &tail), None, "{format} one byte later");
        }
    }

    #[test]
    fn vhd_footer_at_end_is_recognised_in_both_lengths() {
        let head = vec![0; EXAMINED];
        assert_eq!(Format::of(&head, &at(0, VHD_COOKIE)), Some(Format::Vhd));
        assert_eq!(Format::of(&head, &at(1, VHD_COOKIE)), Some(Format::Vhd));
        assert_eq!(Format::of(&head, &at(2, VHD_COOKIE)), None);
    }

    #[test]
    fn short_or_empty_content_has_no_format() {
        for len in 0..4 {
            assert_eq!(Format::of(&b"QFI\xfb"[..len], b"conecti"), None);
        }
        assert_eq!(Format::of(b"QFI\xfb", b""), Some(Format::Qcow));
    }

    #[test]
    fn master_boot_record_and_file_systems_are_raw() {
        let boot = at(510, &[0x55, 0xaa]);
        assert_eq!(Format::of(&boot, &boot), None);
        assert_eq!(Format::of(&at(0, b"XFSB"), &at(0, b"EFI PART")), None);
    }
}
