//! A value read from files, read again when they change.
//!
//! What one would get wrong: a file that cannot be read, or whose content is wrong, leaves the value before it in charge.
//! Half of a change (a certificate without its key yet) is such a file, and the rest of it is another change. Files are
//! told apart by what the kernel says of them, so a replaced symbolic link (Kubernetes secrets) counts as well.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use crate::error::CoreError;

type Load<T> = Box<dyn Fn() -> Result<T, CoreError> + Send + Sync>;

/// Device, inode, size, and times of the last change of content and of anything; `None`: there is no such file.
type Stamp = Option<(u64, u64, u64, (i64, i64), (i64, i64))>;

/// See the module text.
pub(crate) struct Watched<T> {
    /// The field of the configuration that names the files.
    field: &'static str,
    paths: Vec<PathBuf>,
    load: Load<T>,
    current: ArcSwap<T>,
    seen: Mutex<Vec<Stamp>>,
}

impl<T> std::fmt::Debug for Watched<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Watched").field("paths", &self.paths).finish_non_exhaustive()
    }
}

impl<T> Watched<T> {
    /// Reads for the first time.
    ///
    /// # Errors
    ///
    /// What `load` says: there is nothing yet that could stay in charge.
    pub(crate) fn open(
        field: &'static str,
        paths: Vec<PathBuf>,
        load: impl Fn() -> Result<T, CoreError> + Send + Sync + 'static,
    ) -> Result<Self, CoreError> {
        let seen = Mutex::new(stamps(&paths)); // before reading: a change in between is then another one
        let current = ArcSwap::from_pointee(load()?);
        Ok(Self { field, paths, load: Box::new(load), current, seen })
    }

    pub(crate) fn current(&self) -> Arc<T> {
        self.current.load_full()
    }

    /// Reads again if any of the files is another one than before. Blocks on the file system.
    pub(crate) fn refresh(&self) {
        let now = stamps(&self.paths);
        {
            let mut seen = self.seen.lock();
            if *seen == now {
                return;
            }
            *seen = now;
        }
        match (self.load)() {
            Ok(value) => {
                self.current.store(Arc::new(value));
                tracing::info!("{}: read again", self.field);
            }
            Err(error) => tracing::warn!("{}: {error}; what was read before stays in charge", self.field),
        }
    }
}

fn stamps(paths: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |path: &PathBuf| {
        let told = std::fs::metadata(path).ok()?;
        Some((
            told.dev(),
            told.ino(),
            told.size(),
            (told.mtime(), told.mtime_nsec()),
            (told.ctime(), told.ctime_nsec()),
        ))
    };
    paths.iter().map(stamp).collect()
}

/// Reads a small file whole.
///
/// # Errors
///
/// The file cannot be read, or is larger than `bytes_max`.
pub(crate) fn read(path: &str, bytes_max: u64) -> Result<Vec<u8>, CoreError> {
    let failed = |reason: String| CoreError::File { path: path.to_owned(), reason };
    let size = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if size > bytes_max {
        return Err(failed(format!("it has {size} bytes, more than {bytes_max}")));
    }
    std::fs::read(path).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(path: &std::path::Path) -> Watched<u32> {
        let file = path.to_str().unwrap().to_owned();
        let load = move || {
            let text = String::from_utf8(read(&file, 100)?).unwrap();
            text.trim().parse().map_err(|_| CoreError::Config("no number".to_owned()))
        };
        Watched::open("n", vec![path.to_owned()], load).unwrap()
    }

    #[test]
    fn a_changed_file_is_read_again_and_a_bad_or_absent_one_changes_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("n");
        std::fs::write(&path, "1").unwrap();
        let watched = number(&path);
        assert_eq!(*watched.current(), 1);
        for (content, expected) in [("22", 22), ("no", 22), ("333", 333)] {
            std::fs::write(&path, content).unwrap();
            watched.refresh();
            assert_eq!(*watched.current(), expected, "{content}");
        }
        std::fs::remove_file(&path).unwrap();
        watched.refresh();
        assert_eq!(*watched.current(), 333);
    }

    #[test]
    fn a_file_renamed_into_place_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, next) = (folder.path().join("n"), folder.path().join("next"));
        std::fs::write(&path, "1").unwrap();
        let watched = number(&path);
        std::fs::write(&next, "2").unwrap();
        std::fs::rename(&next, &path).unwrap();
        watched.refresh();
        assert_eq!(*watched.current(), 2);
    }

    #[test]
    fn a_huge_file_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 30).unwrap();
        let error = read(file.path().to_str().unwrap(), 1000).unwrap_err();
        assert!(error.to_string().contains("more than 1000"), "{error}");
    }
}
