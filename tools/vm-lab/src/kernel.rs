//! Contents of Debian's kernel package: the unpacked kernel, and the modules that the machines load.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;
use taskkit::tools::Toolbox;

use super::cpio::Archive;

/// Returns the ELF kernel in a bzImage. Xen and its toolstack load both forms. Unpacking it here saves the emulated
/// machine from doing so, once for dom0 and once for each guest. Debian's kernels are compressed with xz, and with
/// zstd from 6.12 on.
pub(crate) fn unpack(image: &[u8], scratch: &Path, toolbox: &Toolbox) -> anyhow::Result<Vec<u8>> {
    let payload = payload(image).context("the kernel is no bzImage that we know")?;
    let (program, packed) = if payload.starts_with(b"\xfd7zXZ\0") {
        ("xz", "vmlinux.xz")
    } else if payload.starts_with(b"\x28\xb5\x2f\xfd") {
        ("zstd", "vmlinux.zst")
    } else {
        anyhow::bail!("the kernel is compressed neither with xz nor with zstd, as Debian's are");
    };
    std::fs::write(scratch.join(packed), payload)?;
    let command = Cmd::new(program).env("PATH", toolbox.path());
    let unpacked = command.args(["--decompress", "--force", "-q", packed]).output(scratch)?;
    unpacked.map_err(|message| anyhow::anyhow!("{program}: {message}"))?;
    let kernel = std::fs::read(scratch.join("vmlinux"))?;
    anyhow::ensure!(kernel.starts_with(b"\x7fELF"), "the kernel's payload is no ELF file");
    Ok(kernel)
}

/// Returns the compressed part of a bzImage (Documentation/arch/x86/boot.rst): setup_sects at 0x1f1, payload_offset
/// at 0x248, payload_length at 0x24c. Its last four bytes are the unpacked size.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = image.get(at..at + 4)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    if image.get(0x202..0x206)? == [0; 4] || image.get(0x1fe..0x200)? != [0x55, 0xaa] {
        return None;
    }
    let setup = (usize::from(*image.get(0x1f1)?) + 1) * 512;
    let start = setup.checked_add(word(0x248)?)?;
    let end = start.checked_add(word(0x24c)?)?.checked_sub(4)?;
    image.get(start..end)
}

/// Path of the loader in the package of the C library.
pub(crate) const LOADER: &str = "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2";

/// Returns the path of a file of unpacked packages. In later releases what was in `/bin`, `/sbin` and `/lib` is in
/// `/usr`.
pub(crate) fn in_root(root: &Path, path: &str) -> PathBuf {
    let earlier = root.join(path);
    if earlier.exists() { earlier } else { root.join("usr").join(path) }
}

/// Returns the command that unpacks the modules in `folder`, which packages have compressed from 6.12 on.
pub(crate) fn unpack_modules(folder: &Path) -> [String; 9] {
    let folder = folder.display().to_string();
    ["find", &folder, "-name", "*.ko.xz", "-exec", "xz", "--decompress", "{}", "+"]
        .map(str::to_owned)
}

/// Modules of older kernels. The functions of newer ones are part of others.
const OLDER: [&str; 1] = ["crc32c_generic"];

/// Modules of one kernel.
pub(crate) struct Modules {
    release: String,
    /// Files by module name, with underscores as in the kernel.
    files: BTreeMap<String, PathBuf>,
    /// Names of modules that are part of the kernel.
    built_in: Vec<String>,
    root: PathBuf,
}

impl Modules {
    /// Finds the modules in `root/lib/modules/RELEASE`.
    pub(crate) fn find(root: &Path, release: &str) -> anyhow::Result<Modules> {
        let root = in_root(root, "lib/modules").join(release);
        let mut files = BTreeMap::new();
        for entry in walkdir::WalkDir::new(root.join("kernel")) {
            let path = entry?.into_path();
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            if let Some(name) = name.as_deref().and_then(|name| name.strip_suffix(".ko")) {
                files.insert(spelled(name), path);
            }
        }
        let built_in = std::fs::read_to_string(root.join("modules.builtin"))?;
        let built_in = built_in
            .lines()
            .filter_map(|line| Path::new(line).file_stem())
            .map(|name| spelled(&name.to_string_lossy()))
            .collect();
        Ok(Modules { release: release.to_owned(), files, built_in, root })
    }

    /// Adds the named modules with their dependencies, and the index that busybox's modprobe reads.
    pub(crate) fn add<W: Write>(
        &self,
        names: &[&str],
        archive: &mut Archive<W>,
    ) -> anyhow::Result<()> {
        let folder = format!("lib/modules/{}", self.release);
        let mut order = vec![];
        for name in names {
            let is_known = self.files.contains_key(*name);
            if is_known || !OLDER.contains(name) {
                self.require(&spelled(name), &mut order)?;
            }
        }
        let mut index = String::new();
        for module in &order {
            archive.copy(&format!("{folder}/{}", self.relative(module)), &self.files[module])?;
            let mut needs = vec![];
            self.require(module, &mut needs)?;
            // The last name in the order is the module itself. modprobe loads a line from its end.
            let needs: Vec<String> =
                needs.iter().rev().skip(1).map(|need| self.relative(need)).collect();
            index += &format!("{}: {}\n", self.relative(module), needs.join(" "));
        }
        archive.file(&format!("{folder}/modules.dep"), false, index.as_bytes())?;
        for empty in ["modules.alias", "modules.symbols"] {
            archive.file(&format!("{folder}/{empty}"), false, b"")?;
        }
        Ok(())
    }

    /// Appends `name` to `order`, after its dependencies.
    fn require(&self, name: &str, order: &mut Vec<String>) -> anyhow::Result<()> {
        if order.iter().any(|there| there == name) || self.built_in.iter().any(|b| b == name) {
            return Ok(());
        }
        let file = self.files.get(name).with_context(|| {
            format!("kernel {} has no module {name}, nor has it built in", self.release)
        })?;
        for need in dependencies(&std::fs::read(file)?)? {
            self.require(&spelled(&need), order)?;
        }
        order.push(name.to_owned());
        Ok(())
    }

    fn relative(&self, module: &str) -> String {
        let file = &self.files[module];
        file.strip_prefix(&self.root).unwrap_or(file).to_string_lossy().into_owned()
    }
}

fn spelled(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns the names after `depends=` in the section .modinfo, which holds strings that end with a zero byte.
fn dependencies(module: &[u8]) -> io::Result<Vec<String>> {
    const KEY: &[u8] = b"\0depends=";
    let start = module.windows(KEY.len()).position(|window| window == KEY);
    let start = start.ok_or_else(|| io::Error::other("a module without its list of needs"))?;
    let list = module[start + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let list = String::from_utf8_lossy(list);
    Ok(list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("lib/modules/6.1");
        std::fs::create_dir_all(folder.join("kernel/net")).unwrap();
        std::fs::write(folder.join("modules.builtin"), "kernel/drivers/virtio.ko\n").unwrap();
        for (name, needs) in
            [("nine-p", "nine_pnet,netfs,virtio"), ("nine_pnet", ""), ("netfs", "nine_pnet")]
        {
            let text = format!("ELF\0license=GPL\0depends={needs}\0name=x\0");
            std::fs::write(folder.join(format!("kernel/net/{name}.ko")), text).unwrap();
        }
        root
    }

    #[test]
    fn dependencies_precede_module_and_built_in_ones_are_omitted() {
        let root = tree();
        let modules = Modules::find(root.path(), "6.1").unwrap();
        let mut order = vec![];
        modules.require("nine_p", &mut order).unwrap();
        assert_eq!(order, ["nine_pnet", "netfs", "nine_p"]);
        let mut archive = Archive::new(Vec::new());
        modules.add(&["nine-p"], &mut archive).unwrap();
        let text = String::from_utf8_lossy(&archive.finish().unwrap()).into_owned();
        assert!(
            text.contains("kernel/net/nine-p.ko: kernel/net/netfs.ko kernel/net/nine_pnet.ko\n")
        );
    }

    #[test]
    fn files_of_later_releases_are_found_in_usr() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("usr/sbin")).unwrap();
        std::fs::write(root.path().join("usr/sbin/mke2fs"), "").unwrap();
        assert_eq!(in_root(root.path(), "sbin/mke2fs"), root.path().join("usr/sbin/mke2fs"));
        std::fs::create_dir(root.path().join("sbin")).unwrap();
        std::fs::write(root.path().join("sbin/mke2fs"), "").unwrap();
        assert_eq!(in_root(root.path(), "sbin/mke2fs"), root.path().join("sbin/mke2fs"));
    }

    #[test]
    fn missing_module_is_an_error() {
        let root = tree();
        let modules = Modules::find(root.path(), "6.1").unwrap();
        let error = modules.require("gone", &mut vec![]).unwrap_err();
        assert!(error.to_string().contains("has no module gone"), "{error}");
    }

    #[test]
    fn payload_lies_at_offset_of_header() {
        let mut image = vec![0; 4096];
        image[0x1f1] = 1;
        image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&9_u32.to_le_bytes());
        image[1040..1049].copy_from_slice(b"helloSIZE");
        assert_eq!(payload(&image).unwrap(), b"hello");
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(payload(&image).is_none());
        assert!(payload(b"MZ").is_none());
    }
}
