//! Our own part of a machine's root file system, appended to the images at each boot: the files of
//! `vm/`, the program under test, and what this boot is to do.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;

use anyhow::Context as _;

use super::cpio::Archive;
use super::images::Images;
use super::machine::Kind;

/// What a boot is to do.
pub(super) struct Orders<'a> {
    /// The scenarios, in this order.
    pub(super) scenarios: Vec<(&'a str, u32)>,
    /// By how much every limit of time is stretched.
    pub(super) patience: u32,
    /// Ends with a shell on the console.
    pub(super) shell: bool,
    /// The hypervisor was built for debugging.
    pub(super) debug: bool,
}

/// Writes the complete root file system for a machine to `to`.
pub(super) fn write(
    to: &Path,
    kind: Kind,
    images: &Images,
    repository: &Path,
    program: &Path,
    orders: &Orders<'_>,
) -> anyhow::Result<()> {
    let base = images.path(if kind.is_xen() { "dom0.cpio" } else { "linux.cpio" });
    let mut out = File::create(to).with_context(|| to.display().to_string())?;
    let mut base = File::open(&base).with_context(|| base.display().to_string())?;
    io::copy(&mut base, &mut out)?;

    let ours = repository.join("vm");
    let program = std::fs::read(program).with_context(|| program.display().to_string())?;
    let init = if kind.is_xen() { "xen/dom0-init" } else { "linux/init" };
    let mut archive = Archive::new(BufWriter::new(out));
    archive.file("init", true, &std::fs::read(ours.join(init))?)?;
    archive.tree("vm", &ours)?;
    archive.file("vm/blob", false, &blob())?;
    archive.file("vm/orders", false, orders.text(kind).as_bytes())?;
    archive.file("usr/bin/ringfence", true, &program)?;
    if kind.is_xen() {
        let mut guest = Archive::new(Vec::new());
        guest.file("init", true, &std::fs::read(ours.join("xen/guest-init"))?)?;
        guest.tree("vm", &ours)?;
        guest.file("vm/blob", false, &blob())?;
        guest.file("usr/bin/ringfence", true, &program)?;
        archive.file("boot/ours.cpio", false, &guest.finish()?)?;
    }
    archive.finish()?;
    Ok(())
}

impl Orders<'_> {
    /// As the shell reads it: variables, then a line `SCENARIO LIMIT` each in a here-document's stead.
    fn text(&self, kind: Kind) -> String {
        let flag = |on: bool| if on { "yes" } else { "" };
        let mut text = format!(
            "PATIENCE={}\nSHELL_WANTED={}\nDEBUG_XEN={}\nSUITE={}\nSCENARIOS=\"\n",
            self.patience,
            flag(self.shell),
            flag(self.debug),
            if kind.is_xen() { "xen" } else { "linux" },
        );
        for (name, limit) in &self.scenarios {
            text += &format!("{name} {limit}\n");
        }
        text + "\"\n"
    }
}

/// A little more than a mebibyte that looks random, the same every time: what transfers are made of.
/// Its length keeps repetitions from falling together with pages.
fn blob() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        // xorshift64 (Marsaglia)
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.flatten().take((1 << 20) + 13).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_shell() {
        let orders = Orders {
            scenarios: vec![("hello", 30), ("ping", 60)],
            patience: 4,
            shell: false,
            debug: true,
        };
        assert_eq!(
            orders.text(Kind::Xen),
            "PATIENCE=4\nSHELL_WANTED=\nDEBUG_XEN=yes\nSUITE=xen\nSCENARIOS=\"\nhello 30\nping 60\n\"\n"
        );
    }

    #[test]
    fn the_blob_does_not_repeat_within_itself() {
        let blob = blob();
        let mut words: Vec<&[u8]> = blob.chunks_exact(8).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), blob.len() / 8);
    }
}
