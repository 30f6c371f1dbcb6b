//! Following redirects, without giving a stranger the token.

use super::{Client, Method, Request, Response, header};
use crate::{ClientError, Result};

/// Most redirects in a row.
const MAX_REDIRECTS: usize = 10;

/// Sends a `GET` or `HEAD` and follows redirects. `Authorization` goes to the origin of `request` only, and
/// an encrypted connection is never followed by an open one.
///
/// `stay` ends it at the first redirect to another origin, whose answer is given as it is: a hub says
/// there what the file is, before it sends the client to where its bytes are.
///
/// # Errors
/// As [`Client::send`], and [`ClientError::Protocol`] for redirects without an end or a usable target.
pub async fn send_with_redirects(
    client: &Client,
    request: &Request,
    stay: bool,
) -> Result<Response> {
    debug_assert!(matches!(request.method, Method::GET | Method::HEAD));
    let home = request.url.origin();
    let mut request = request.clone();
    for _ in 0..=MAX_REDIRECTS {
        let response = client.send(&request).await?;
        let Some(location) = response
            .header("location")
            .filter(|_| response.status.is_redirection())
        else {
            return Ok(response);
        };
        let next = request.url.join(location)?;
        if stay && next.origin() != home {
            return Ok(response);
        }
        if request.url.is_tls() && !next.is_tls() {
            return Err(protocol(
                &request,
                format!("redirects to {next}, which is not encrypted"),
            ));
        }
        if next.origin() != home {
            request.headers.remove(header::AUTHORIZATION);
        }
        response.drain().await;
        request.url = next;
    }
    Err(protocol(
        &request,
        format!("more than {MAX_REDIRECTS} redirects"),
    ))
}

fn protocol(request: &Request, reason: String) -> ClientError {
    ClientError::Protocol {
        url: request.url.to_string(),
        reason,
    }
}
