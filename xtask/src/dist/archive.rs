//! Archives whose bytes depend on the files alone: sorted names, one time, no owner.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use taskkit::exec::Cmd;
use taskkit::tree::Tree;

/// Packs a tree as `NAME.tar.xz` in `folder`. The paths in it begin with `name`. Returns the archive's path.
pub(super) fn tar_xz(
    tree: &Tree,
    name: &str,
    folder: &Path,
    epoch: u64,
) -> anyhow::Result<PathBuf> {
    tree.open_directories()?;
    let archive = folder.join(format!("{name}.tar"));
    let made = Cmd::new("tar")
        .args(["--create", "--sort=name", "--format=ustar", "--owner=0", "--group=0"])
        .args(["--numeric-owner", &format!("--mtime=@{epoch}")])
        // Of the whole path, so that links keep their targets.
        .args([format!("--transform=flags=r;s,^\\.,{name},")])
        .args(["--file".as_ref(), archive.as_os_str()])
        .args(["--directory".as_ref(), tree.root().as_os_str(), ".".as_ref()]);
    made.output(folder)?.map_err(|message| anyhow::anyhow!("tar: {message}"))?;
    // Several threads would divide the file differently from computer to computer.
    let packed = Cmd::new("xz")
        .args(["--force".as_ref(), "--threads=1".as_ref(), archive.as_os_str()])
        .env_remove("XZ_DEFAULTS")
        .env_remove("XZ_OPT");
    packed.output(folder)?.map_err(|message| anyhow::anyhow!("xz: {message}"))?;
    Ok(folder.join(format!("{name}.tar.xz")))
}

/// Packs the files of a tree as the zip archive `archive`, those in `last` at its end.
pub(super) fn zip(tree: &Tree, last: &Path, archive: &Path, epoch: u64) -> anyhow::Result<()> {
    tree.set_times(epoch)?;
    // The program adds to an archive that exists.
    if archive.exists() {
        std::fs::remove_file(archive)?;
    }
    let mut files = tree.files()?;
    files.sort_by_key(|file| (file == last, file.clone()));
    let made = Cmd::new("zip")
        // Neither directories nor fields of this file system.
        .args(["-q", "-X", "-D"])
        .args([archive])
        .args(files)
        // Times in a zip archive have no zone.
        .env("TZ", "UTC")
        .env_remove("ZIPOPT");
    made.output(tree.root())?.map_err(|message| anyhow::anyhow!("zip: {message}"))?;
    Ok(())
}

/// Writes the checksums of files as `SHA256SUMS`, as sha256sum(1) reads them, beside them. Returns its path.
pub(super) fn write_sums(files: &[PathBuf], folder: &Path) -> anyhow::Result<PathBuf> {
    let mut lines = Vec::new();
    for file in files {
        let name = file.file_name().context("an archive has a name")?.to_string_lossy();
        let sum = Sha256::digest(std::fs::read(file)?);
        lines.push((name.into_owned(), HEXLOWER.encode(&sum)));
    }
    lines.sort();
    let text: String = lines.iter().map(|(name, sum)| format!("{sum}  {name}\n")).collect();
    let sums = folder.join("SHA256SUMS");
    std::fs::write(&sums, text)?;
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(folder: &Path) -> Tree {
        let tree = Tree::new(folder.join("tree")).unwrap();
        tree.add("share/doc/b", 0o644, "b").unwrap();
        tree.add("bin/ringfence", 0o755, "#!/bin/sh\n").unwrap();
        tree.link("libexec/pasta", "../bin/ringfence").unwrap();
        tree
    }

    #[test]
    fn tarballs_of_one_content_are_equal_and_begin_with_their_name() {
        if !Cmd::new("xz").args(["--version"]).probe() {
            println!("SKIPPED: xz is missing (Debian package xz-utils)");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let mut made = Vec::new();
        for part in ["one", "two/deeper"] {
            let folder = folder.path().join(part);
            std::fs::create_dir_all(&folder).unwrap();
            let archive = tar_xz(&tree(&folder), "ringfence-1", &folder, 1_000_000_000).unwrap();
            made.push(std::fs::read(&archive).unwrap());
            let list = Cmd::new("tar").args([
                "--list".as_ref(),
                "--verbose".as_ref(),
                "--file".as_ref(),
                archive.as_os_str(),
            ]);
            let list = list.env("TZ", "UTC").output(&folder).unwrap().unwrap();
            let paths: Vec<&str> =
                list.lines().filter_map(|line| line.split("ringfence-1/").nth(1)).collect();
            let expected = [
                "",
                "bin/",
                "bin/ringfence",
                "libexec/",
                "libexec/pasta -> ../bin/ringfence",
                "share/",
                "share/doc/",
                "share/doc/b",
            ];
            assert_eq!(paths, expected, "{list}");
            assert!(
                list.lines().all(|line| line.contains(" 0/0 ") && line.contains(" 2001-09-09 ")),
                "{list}"
            );
            assert!(list.contains("-rwxr-xr-x"), "{list}");
        }
        assert!(made[0] == made[1]);
    }

    #[test]
    fn checksums_are_sorted_and_read_by_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["b", "a"].map(|name| folder.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, "x").unwrap());
        let sums = write_sums(&files, folder.path()).unwrap();
        let text = std::fs::read_to_string(sums).unwrap();
        let names: Vec<&str> = text.lines().map(|line| &line[64..]).collect();
        assert_eq!(names, ["  a", "  b"]);
        let checked = Cmd::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]);
        assert!(checked.output(folder.path()).unwrap().is_ok());
    }
}
