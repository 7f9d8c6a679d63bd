//! What the kernel counts for a container: the answer to the Stats request.
//!
//! The same messages with the same fields as Go's shim, since the readers (`ctr tasks metrics`,
//! the CRI plugin, cAdvisor) know those. A controller or file that is not there leaves its fields
//! empty, as there; what is there is always told.

mod files;
mod v1;
mod v2;

use std::path::Path;

use containerd_shim::protos::protobuf::well_known_types::any::Any;
use containerd_shim::protos::protobuf::{self, Message};

use crate::cgroup::Cgroups;

/// Names as Go's typeurl gives them: without a host before them.
const V1_NAME: &str = "io.containerd.cgroups.v1.Metrics";
/// See [`V1_NAME`].
const V2_NAME: &str = "io.containerd.cgroups.v2.Metrics";

/// The metrics cannot be told.
#[derive(Debug, thiserror::Error)]
#[error("cannot encode a container's metrics")]
pub struct MetricsError(#[from] protobuf::Error);

/// Reads all metrics of a container. It reads some twenty files of the kernel, so it is not for
/// the runtime's thread.
pub fn collect(cgroups: &Cgroups) -> Result<Any, MetricsError> {
    collect_under(Path::new("/"), cgroups)
}

/// `root` has the host's proc and sys.
fn collect_under(root: &Path, cgroups: &Cgroups) -> Result<Any, MetricsError> {
    let (name, value) = match cgroups {
        Cgroups::V1(directories) => (V1_NAME, v1::read(root, directories).write_to_bytes()?),
        Cgroups::V2(directory) => (V2_NAME, v2::read(root, directory).write_to_bytes()?),
    };
    Ok(Any { type_url: name.to_owned(), value, ..Any::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use containerd_shim::protos::protobuf::MessageFull as _;
    use containerd_shim::protos::{cgroups, cgroups_v2};

    #[test]
    fn the_names_are_the_messages_own() {
        assert_eq!(cgroups::metrics::Metrics::descriptor().full_name(), V1_NAME);
        assert_eq!(cgroups_v2::metrics::Metrics::descriptor().full_name(), V2_NAME);
    }

    #[test]
    fn cgroups_that_are_gone_have_empty_metrics() {
        let gone = Path::new("/nonexistent");
        let v1 = Cgroups::V1([("memory".to_owned(), gone.to_owned())].into());
        let any = collect(&v1).unwrap();
        assert_eq!(any.type_url, V1_NAME);
        let metrics = cgroups::metrics::Metrics::parse_from_bytes(&any.value).unwrap();
        assert!(metrics.cpu.usage.is_some() && metrics.memory.is_none());

        let any = collect(&Cgroups::V2(gone.to_owned())).unwrap();
        assert_eq!(any.type_url, V2_NAME);
        let metrics = cgroups_v2::metrics::Metrics::parse_from_bytes(&any.value).unwrap();
        assert!(metrics.cpu.is_some() && metrics.memory_events.is_none());
    }
}
