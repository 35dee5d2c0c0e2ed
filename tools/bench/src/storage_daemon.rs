//! Command line of qemu-storage-daemon, which other programs' rows of `block` and `vhost-user blk` use.

use std::path::Path;
use std::process::Command;

use ringfence_block::storage::file::CacheMode;

use crate::block::args::ImageFormat;

/// Image that the daemon serves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DaemonImage<'a> {
    pub(crate) file: &'a Path,
    pub(crate) format: ImageFormat,
    pub(crate) cache: CacheMode,
    /// Way in which the daemon performs the I/O, as its option `aio` has it.
    pub(crate) aio: &'static str,
}

/// Returns a path as a value in an option of the daemon.
pub(crate) fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

impl DaemonImage<'_> {
    /// Returns the command of a daemon that has the image as its node `disk`. The caller adds the export.
    pub(crate) fn command(&self) -> Command {
        let DaemonImage { file, format, cache, aio } = *self;
        let direct = format!("cache.direct={}", if cache.is_direct() { "on" } else { "off" });
        let file = format!("driver=file,filename={},{direct},aio={aio}", quoted(file));
        let mut command = Command::new("qemu-storage-daemon");
        match format {
            // A node above the file would only pass requests on.
            ImageFormat::Raw => command.arg("--blockdev").arg(format!("{file},node-name=disk")),
            ImageFormat::Qcow2 => {
                command.arg("--blockdev").arg(format!("{file},node-name=file"));
                let driver = format!("driver={},node-name=disk,file=file,{direct}", format.name());
                command.arg("--blockdev").arg(driver)
            }
        };
        command
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(format: ImageFormat) -> Vec<String> {
        let file = Path::new("/a,b");
        let image = DaemonImage { file, format, cache: CacheMode::WriteBack, aio: "threads" };
        let command = image.command();
        command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn raw_image_is_one_node_and_qcow2_is_two() {
        let file = "driver=file,filename=/a,,b,cache.direct=off,aio=threads";
        assert_eq!(words(ImageFormat::Raw)[1], format!("{file},node-name=disk"));
        let layers = words(ImageFormat::Qcow2);
        assert_eq!(layers[1], format!("{file},node-name=file"));
        assert_eq!(layers[3], "driver=qcow2,node-name=disk,file=file,cache.direct=off");
    }
}
