// SPDX-License-Identifier: Apache-2.0
package org.diffulex.edge;

/**
 * Decodes one request at a time with a program of {@code diffulex edge export}.
 *
 * <p>One thread at a time generates and closes; {@link #cancel} may be called from any. A session
 * keeps the program and its cache in memory until it is closed.
 */
public final class EdgeSession implements AutoCloseable {
  static {
    System.loadLibrary("diffulex_edge_jni");
  }

  /** Is told what settles while an answer is decoded, on the thread that generates. */
  public interface Listener {
    /**
     * @param tokens ids that are never taken back
     * @return false ends the answer
     */
    boolean onTokens(int[] tokens);
  }

  private volatile long handle;

  /**
   * Loads a bundle.
   *
   * @param bundle directory of {@code model.pte} and {@code session.conf}, files that can be mapped
   * @param threads of the process's one pool; 0: the physical cores
   * @throws IllegalArgumentException if it cannot be read, run here or decoded
   */
  public EdgeSession(String bundle, int threads) {
    handle = create(bundle, threads);
  }

  /**
   * Decodes an answer with the settings of the bundle.
   *
   * @param prompt token ids
   * @param maxTokens most ids of the answer; 0: the bundle's, or what fits
   * @param listener may be null
   * @return ids of the answer, without what ended it
   * @throws IllegalArgumentException if the prompt is empty, too long or not of the vocabulary
   * @throws IllegalStateException if the session is closed or the program fails
   */
  public int[] generate(int[] prompt, int maxTokens, Listener listener) {
    return generate(opened(), prompt, maxTokens, listener);
  }

  /** Asks for the end of the running request; does nothing where none runs. */
  public synchronized void cancel() {
    // The lock keeps the session from being freed meanwhile. generate, which takes long, has none.
    if (handle != 0) {
      cancel(handle);
    }
  }

  /** Frees the program. A session that is closed already stays so. */
  @Override
  public synchronized void close() {
    if (handle != 0) {
      destroy(handle);
      handle = 0;
    }
  }

  private long opened() {
    if (handle == 0) {
      throw new IllegalStateException("session: expected an open one, got a closed one");
    }
    return handle;
  }

  private static native long create(String bundle, int threads);

  private static native int[] generate(long handle, int[] prompt, int maxTokens, Listener listener);

  private static native void cancel(long handle);

  private static native void destroy(long handle);
}
